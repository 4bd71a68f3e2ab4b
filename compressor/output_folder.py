"""What an output folder is before a run takes it: usable, empty, complete, or with a crash's leftovers."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from memopt.errors import OutputError
from memopt.manifests.release_description import RELEASE_NAME

STATE_FOLDER = ".memopt"
FINISHED_FOLDER = ".memopt-finished"
# At the root of an ext4 file system, made by mkfs for fsck: no file of anybody's.
_MOUNT_ROOT_FOLDER = "lost+found"


def check_output_place(source: Path, out: Path) -> None:
    """OutputError if `out` is the source, inside it, around it, or not a folder."""
    try:
        source_real, out_real = source.resolve(), out.resolve()
        is_other_file = os.path.lexists(out) and not out.is_dir()
    except (OSError, RuntimeError) as problem:
        # RuntimeError: a loop of links, before Python 3.13.
        reason = problem.strerror if isinstance(problem, OSError) else str(problem)
        raise OutputError(f"cannot use output {out}: {reason}", remedy="choose another output folder") from None
    if out_real == source_real or source_real in out_real.parents:
        raise OutputError(f"output {out} is inside the source", remedy="choose a folder outside the checkpoint")
    if out_real in source_real.parents:
        raise OutputError(f"the source is inside the output {out}", remedy="choose another output folder")
    if is_other_file:
        raise OutputError(f"output {out} is not a folder", remedy="choose another output folder")


def is_complete(out: Path, fingerprint: str) -> bool:
    """Whether `out` holds the finished release of this very plan."""
    return not os.path.exists(out / STATE_FOLDER) and finished_fingerprint(out) == fingerprint


def finished_fingerprint(out: Path) -> str | None:
    """The fingerprint in release.json, None if there is none to be read."""
    try:
        return str(json.loads((out / RELEASE_NAME).read_bytes())["identity"]["plan_fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def entries_of(out: Path) -> set[str]:
    """Names in `out`; what mkfs put at a file system's root does not count as a file in it."""
    names = set(os.listdir(out))
    if _MOUNT_ROOT_FOLDER in names and _is_empty_folder(out / _MOUNT_ROOT_FOLDER):
        names.remove(_MOUNT_ROOT_FOLDER)
    return names


def _is_empty_folder(path: Path) -> bool:
    if path.is_symlink() or not path.is_dir():
        return False
    try:
        return not os.listdir(path)
    except PermissionError:
        # Root's alone, as mkfs makes it.
        return True


def remove_leftovers(out: Path) -> None:
    """Remove the state of a finished run that a crash left behind."""
    shutil.rmtree(out / FINISHED_FOLDER, ignore_errors=True)
