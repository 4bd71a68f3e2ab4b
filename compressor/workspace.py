"""The output folder while a run is in it: who may use it, what is finished, what survives a crash.

    OUT/.memopt/lock                held (flock) by the one run
    OUT/.memopt/plan.json           fingerprint and file stamps of the source
    OUT/.memopt/units/00001.json    written after its weight file is on disk under its final name
    OUT/.memopt/tmp/                files in flight

The state folder goes last: it is renamed to OUT/.memopt-finished, then removed. So a folder without it, but with
release.json, is complete, and a crash on the way out leaves nothing that looks half done.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from memopt.compressor.checkpoint.disk_errors import write_error
from memopt.compressor.checkpoint.reader import FileStamp
from memopt.compressor.checkpoint.writer import sync_folder, write_atomically
from memopt.compressor.ledger import LEDGER_NAME, ErrorFigures
from memopt.compressor.release_file import RELEASE_NAME
from memopt.compressor.units import Unit
from memopt.errors import OutputError

STATE_FOLDER = ".memopt"
FINISHED_FOLDER = ".memopt-finished"


@dataclass(frozen=True)
class UnitRecord:
    """What a finished unit left: its ledger lines and its error figures by role."""

    lines: tuple[bytes, ...]
    errors_by_role: dict[str, ErrorFigures]


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
    if os.path.exists(out / STATE_FOLDER):
        return False
    try:
        release = json.loads((out / RELEASE_NAME).read_bytes())
        return bool(release["identity"]["plan_fingerprint"] == fingerprint)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def remove_leftovers(out: Path) -> None:
    """Remove the state of a finished run that a crash left behind."""
    shutil.rmtree(out / FINISHED_FOLDER, ignore_errors=True)


class Workspace:
    """The locked output folder of one run."""

    def __init__(self, out: Path, fingerprint: str, file_names: frozenset[str]) -> None:
        self.out = out
        self._state = out / STATE_FOLDER
        self._fingerprint = fingerprint
        self._lock = -1
        self.source_stamps: dict[str, FileStamp] | None = None
        try:
            out.mkdir(parents=True, exist_ok=True)
            entries = {entry.name for entry in out.iterdir()}
            if entries and STATE_FOLDER not in entries:
                self._refuse_foreign(entries)
            self._state.mkdir(exist_ok=True)
            self._acquire()
        except OSError as problem:
            raise write_error(problem, str(out)) from None
        try:
            self._open_state(file_names)
        except OSError as problem:
            self.close()
            raise write_error(problem, str(out)) from None
        except BaseException:
            self.close()
            raise

    def _refuse_foreign(self, entries: set[str]) -> None:
        raise OutputError(
            f"output {self.out} is not empty: it holds {sorted(entries)[0]!r}",
            remedy="choose an empty folder, or one that an interrupted run of the same command left",
        )

    def _acquire(self) -> None:
        self._lock = os.open(self._state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            self._lock = -1
            raise OutputError(
                f"another run is writing to {self.out}", remedy="wait for it, or choose another output folder"
            ) from None

    def _open_state(self, file_names: frozenset[str]) -> None:
        plan_path = self._state / "plan.json"
        entries = {entry.name for entry in self.out.iterdir()} - {STATE_FOLDER}
        if plan_path.exists():
            stored = self._load(plan_path)
            if stored.get("fingerprint") != self._fingerprint:
                raise OutputError(
                    f"{self.out} holds the unfinished work of another source, recipe, option or memopt version",
                    remedy=f"repeat that command, or remove {self.out} to start anew",
                )
            self.source_stamps = {
                name: FileStamp(size, changed) for name, (size, changed) in stored["source_files"].items()
            }
            entries -= file_names
        if entries:
            if os.listdir(self._state) == ["lock"]:
                # The folder was made by this refused run: another one finished here a moment ago.
                shutil.rmtree(self._state)
            self._refuse_foreign(entries)
        shutil.rmtree(self._state / "tmp", ignore_errors=True)
        (self._state / "tmp").mkdir()
        (self._state / "units").mkdir(exist_ok=True)

    def _load(self, path: Path) -> dict[str, Any]:
        try:
            value = json.loads(path.read_bytes())
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise OutputError(f"{path} is damaged", remedy=f"remove {self.out} to start anew")
        return value

    def save_plan(self, stamps: dict[str, FileStamp]) -> None:
        """Record what this run reads, before anything else is written."""
        table = {
            "fingerprint": self._fingerprint,
            "source_files": {name: [stamp.size_bytes, stamp.changed_ns] for name, stamp in sorted(stamps.items())},
        }
        self._write(self._state / "plan.json", json.dumps(table).encode())
        self.source_stamps = stamps

    def temporary(self, name: str) -> Path:
        return self._state / "tmp" / name

    def write_file(self, name: str, data: bytes) -> None:
        """Write a small file of the release atomically."""
        self._write(self.out / name, data)

    def _write(self, path: Path, data: bytes) -> None:
        write_atomically(path, data, self.temporary(path.name))

    def publish_unit(self, unit: Unit, record: UnitRecord) -> None:
        """Give a flushed weight file its final name, then record that it is finished."""
        try:
            os.replace(self.temporary(unit.file_name), self.out / unit.file_name)
            sync_folder(self.out)
        except OSError as problem:
            raise write_error(problem, str(self.out / unit.file_name)) from None
        table = {
            "lines": [line.decode() for line in record.lines],
            "errors": {role: asdict(figures) for role, figures in record.errors_by_role.items()},
        }
        self._write(self._record_path(unit), json.dumps(table, ensure_ascii=False).encode())

    def _record_path(self, unit: Unit) -> Path:
        return self._state / "units" / f"{unit.number:05d}.json"

    def finished_unit(self, unit: Unit) -> UnitRecord | None:
        """The record of a unit that an earlier run finished, if its file still has the planned size and header."""
        path = self._record_path(unit)
        if not path.exists():
            return None
        try:
            with open(self.out / unit.file_name, "rb") as stream:
                if os.fstat(stream.fileno()).st_size != unit.size_bytes:
                    return None
                if stream.read(len(unit.header)) != unit.header:
                    return None
            table = json.loads(path.read_bytes())
            lines = tuple(line.encode() for line in table["lines"])
            errors = {role: ErrorFigures(**figures) for role, figures in table["errors"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            # A damaged record only means that the unit is done again.
            return None
        return UnitRecord(lines, errors) if len(lines) == len(unit.tensors) else None

    def finish(self) -> None:
        """Remove the state: the release is complete."""
        try:
            remove_leftovers(self.out)
            sync_folder(self.out)
            os.rename(self._state, self.out / FINISHED_FOLDER)
            sync_folder(self.out)
            remove_leftovers(self.out)
        except OSError as problem:
            raise write_error(problem, str(self._state)) from None

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Workspace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def release_file_names(units: tuple[Unit, ...], small: tuple[str, ...]) -> frozenset[str]:
    """Every name that a release of these units may hold."""
    return frozenset({*(unit.file_name for unit in units), *small, LEDGER_NAME, RELEASE_NAME})
