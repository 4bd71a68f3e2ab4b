"""The output folder while a run is in it: who may use it, what is finished, what survives a crash.

    OUT/.memopt/lock                held (flock) by the one run
    OUT/.memopt/plan.json           fingerprint and file stamps of the source
    OUT/.memopt/units/00001.json    written after its weight files are on disk under their final names (unit_record.py)
    OUT/.memopt/tmp/                files in flight
    OUT/.memopt/calibration/        codes that follow from calibration data (calibration_store.py)

The state folder goes last: it is renamed to OUT/.memopt-finished, then removed. So a folder without it, but with
release.json, is complete, and a crash on the way out leaves nothing that looks half done.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

from memopt.compressor.checkpoint.disk_errors import write_error
from memopt.compressor.checkpoint.file_stamp import FileStamp
from memopt.compressor.checkpoint.writer import sync_folder
from memopt.compressor.fingerprint import run_fingerprint
from memopt.compressor.output_folder import (
    FINISHED_FOLDER,
    STATE_FOLDER,
    entries_of,
    finished_identity,
    remove_leftovers,
)
from memopt.compressor.unit_folder import UnitFolder
from memopt.compressor.units import Unit
from memopt.errors import OutputError
from memopt.manifests.file_roles import LEDGER_NAME
from memopt.manifests.release_description import RELEASE_NAME

_OTHER_WORK = "another source, recipe, option, or version of memopt, numba or numpy"


class Workspace(UnitFolder):
    """The locked output folder of one run."""

    def __init__(self, out: Path, fingerprint: str, file_names: frozenset[str]) -> None:
        super().__init__(out)
        self._fingerprint = fingerprint
        self._lock = -1
        self.source_stamps: dict[str, FileStamp] | None = None
        try:
            out.mkdir(parents=True, exist_ok=True)
            entries = entries_of(out)
            if entries and STATE_FOLDER not in entries:
                self._refuse_foreign(entries)
            self.state.mkdir(exist_ok=True)
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
        found = finished_identity(self.out) if RELEASE_NAME in entries else None
        if found is not None and run_fingerprint(found.fingerprint, found.layouts) != self._fingerprint:
            raise OutputError(
                f"output {self.out} is not empty: it holds a finished release of {_OTHER_WORK}",
                remedy=f"name another output folder, or remove {self.out} to make it anew",
            )
        raise OutputError(
            f"output {self.out} is not empty: it holds {sorted(entries)[0]!r}",
            remedy="choose an empty folder, or one that an interrupted run of the same command left",
        )

    def _acquire(self) -> None:
        self._lock = os.open(self.state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_held = self._is_lock_in_place()
        except BlockingIOError:
            is_held = False
        if not is_held:
            self.close()
            raise OutputError(
                f"another run is writing to {self.out}", remedy="wait for it, or choose another output folder"
            ) from None

    def _is_lock_in_place(self) -> bool:
        """False if the run that held the lock has finished, and renamed its folder, between our open and our lock."""
        try:
            return os.path.samestat(os.stat(self.state / "lock"), os.fstat(self._lock))
        except FileNotFoundError:
            return False

    def _open_state(self, file_names: frozenset[str]) -> None:
        plan_path = self.state / "plan.json"
        entries = entries_of(self.out) - {STATE_FOLDER}
        if plan_path.exists():
            stored = self._load(plan_path)
            if stored.get("fingerprint") != self._fingerprint:
                raise OutputError(
                    f"{self.out} holds the unfinished work of {_OTHER_WORK}",
                    remedy=f"repeat that command, or remove {self.out} to start anew",
                )
            self.source_stamps = {
                name: FileStamp(size, changed) for name, (size, changed) in stored["source_files"].items()
            }
            entries -= file_names
        if entries:
            if os.listdir(self.state) == ["lock"]:
                # The folder was made by this refused run: another one finished here a moment ago.
                self.close()
                shutil.rmtree(self.state)
            self._refuse_foreign(entries)
        shutil.rmtree(self.state / "tmp", ignore_errors=True)
        (self.state / "tmp").mkdir()
        (self.state / "units").mkdir(exist_ok=True)

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
        self._write(self.state / "plan.json", (json.dumps(table).encode(),))
        self.source_stamps = stamps

    def finish(self) -> None:
        """Remove the state: the release is complete."""
        try:
            remove_leftovers(self.out)
            sync_folder(self.out)
            os.rename(self.state, self.out / FINISHED_FOLDER)
            sync_folder(self.out)
            # Nobody can take the lock under its old name any more, and NFS keeps what is removed while it is open.
            self.close()
            remove_leftovers(self.out)
        except OSError as problem:
            raise write_error(problem, str(self.state)) from None

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
    return frozenset({*(file.name for unit in units for file in unit.files), *small, LEDGER_NAME, RELEASE_NAME})
