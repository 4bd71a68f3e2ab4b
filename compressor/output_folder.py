"""What an output folder is before a run takes it: usable, empty, complete, or with a crash's leftovers."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from memopt.errors import OutputError
from memopt.manifests.rank_folders import parse_layout
from memopt.manifests.release_description import RELEASE_NAME

STATE_FOLDER = ".memopt"
FINISHED_FOLDER = ".memopt-finished"
# At the root of an ext4 file system, made by mkfs for fsck: no file of anybody's.
MOUNT_ROOT_FOLDER = "lost+found"


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


@dataclass(frozen=True)
class FinishedIdentity:
    """What release.json says of a finished release. `fingerprint`: the plan's; `layouts`: as "hub", "tp8"."""

    fingerprint: str
    layouts: tuple[str, ...]


def is_complete(out: Path, identity: FinishedIdentity) -> bool:
    """Whether `out` holds the finished release of this very plan, in these layouts."""
    return not os.path.exists(out / STATE_FOLDER) and finished_identity(out) == identity


def finished_identity(out: Path) -> FinishedIdentity | None:
    """The identity in release.json, None if there is none to be read."""
    try:
        table = json.loads((out / RELEASE_NAME).read_bytes())
        return FinishedIdentity(str(table["identity"]["plan_fingerprint"]), tuple(map(str, table["layouts"])))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def entries_of(out: Path) -> set[str]:
    """Names in `out`, and of rank layouts every file below it ("tp8/rank-3/…").

    What mkfs put at a file system's root does not count as a file in it, nor does a folder of a layout without files.
    """
    names = set(os.listdir(out))
    if MOUNT_ROOT_FOLDER in names and _is_empty_folder(out / MOUNT_ROOT_FOLDER):
        names.remove(MOUNT_ROOT_FOLDER)
    for name in sorted(names):
        folder = out / name
        if parse_layout(name) is not None and folder.is_dir() and not folder.is_symlink():
            names.remove(name)
            names |= _files_below(folder, out)
    return names


def _files_below(folder: Path, out: Path) -> set[str]:
    found: set[str] = set()
    for parent, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        found |= {os.path.relpath(os.path.join(parent, name), out) for name in (*files, *links)}
    return found


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
