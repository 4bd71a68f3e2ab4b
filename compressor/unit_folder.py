"""Units in an output folder: files in flight, published ones, and the record that each leaves in OUT/.memopt."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from memopt.compressor.checkpoint.disk_errors import write_error
from memopt.compressor.checkpoint.writer import sync_folder, write_stream_atomically
from memopt.compressor.output_folder import STATE_FOLDER
from memopt.compressor.unit_record import ErrorsByRole, PublishedStamp, UnitRecord, parse_record, render_record
from memopt.compressor.units import Unit
from memopt.errors import ContentError


@dataclass(frozen=True)
class FinishedUnit:
    """A unit that an earlier run finished. `is_untouched`: its files are those that were published, by their stamps.

    Its ledger lines stay on disk: memory must not grow with the number of tensors.
    """

    errors_by_role: ErrorsByRole
    is_untouched: bool


class UnitFolder:
    """The output folder `out` of a run, as all of its ranks see it. `state`: gone once the release is complete."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.state = out / STATE_FOLDER

    def temporary(self, name: str) -> Path:
        """Where file `name` of the release is written before it has its name."""
        return self.state / "tmp" / name.replace("/", "+")

    def make_folders(self, names: Iterable[str]) -> None:
        """Make the folders below the release that files `names` lie in."""
        try:
            for folder in sorted({path for name in names for path in PurePosixPath(name).parents}):
                if not (self.out / folder).is_dir():
                    (self.out / folder).mkdir()
                    sync_folder((self.out / folder).parent)
        except OSError as problem:
            raise write_error(problem, str(self.out)) from None

    def write_file(self, name: str, data: bytes) -> None:
        """Write a small file of the release atomically."""
        self.write_stream(name, (data,))

    def write_stream(self, name: str, chunks: Iterable[bytes]) -> None:
        """Write a file of the release atomically, without having it in memory."""
        self._write(self.out / name, chunks, self.temporary(name))

    def _write(self, path: Path, chunks: Iterable[bytes], temporary: Path | None = None) -> None:
        write_stream_atomically(path, chunks, temporary or self.temporary(path.name))

    def publish_unit(self, unit: Unit, lines: Iterable[bytes], errors_by_role: ErrorsByRole) -> None:
        """Give a unit's flushed files their final names, then record that it is finished."""
        stamps: dict[str, PublishedStamp] = {}
        path = self.out
        try:
            for file in unit.files:
                path = self.out / file.name
                os.replace(self.temporary(file.name), path)
                # After the rename, which is a change of the file too.
                stamps[file.name] = PublishedStamp.of(os.stat(path))
            for folder in sorted({(self.out / file.name).parent for file in unit.files}):
                path = folder
                sync_folder(folder)
        except OSError as problem:
            raise write_error(problem, str(path)) from None
        self._write(self._record_path(unit), (render_record(UnitRecord(tuple(lines), errors_by_role, stamps)),))

    def _record_path(self, unit: Unit) -> Path:
        return self.state / "units" / f"{unit.number:05d}.json"

    def finished_unit(self, unit: Unit) -> FinishedUnit | None:
        """A unit that an earlier run finished, if its files still have the planned sizes and headers."""
        found: dict[str, PublishedStamp] = {}
        try:
            record = parse_record(self._record_path(unit).read_bytes())
            for file in unit.files:
                header = file.header
                with open(self.out / file.name, "rb") as stream:
                    status = os.fstat(stream.fileno())
                    size_bytes = len(header) + file.data_size_bytes
                    if status.st_size != size_bytes or stream.read(len(header)) != header:
                        return None
                found[file.name] = PublishedStamp.of(status)
        except (OSError, ValueError):
            # A damaged record only means that the unit is done again.
            return None
        if len(record.lines) != len(unit.tensors):
            return None
        return FinishedUnit(record.errors_by_role, record.stamps == found)

    def unit_lines(self, unit: Unit) -> tuple[bytes, ...]:
        """The ledger lines of a unit that is finished; ContentError if its record was changed meanwhile."""
        path = self._record_path(unit)
        try:
            return parse_record(path.read_bytes()).lines
        except (OSError, ValueError):
            raise ContentError(
                "was changed or removed while the run was on",
                file=str(path),
                remedy="run the same command again: that unit is done anew",
            ) from None
