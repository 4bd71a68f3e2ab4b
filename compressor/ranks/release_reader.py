"""Reading the weight files of a finished release: as its ledger describes them, each open while it is needed."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path

from memopt.compressor.checkpoint.disk_errors import read_error
from memopt.compressor.checkpoint.file_stamp import FileStamp
from memopt.compressor.checkpoint.reader import OpenFiles
from memopt.compressor.ranks.released import missing_rank
from memopt.compressor.units import PlannedFile
from memopt.errors import ContentError, MissingFileError, SourceChangedError
from memopt.manifests.file_roles import LEDGER_NAME
from memopt.manifests.open_file import open_regular, read_exactly
from memopt.manifests.rank_folders import place_problem, rank_folder_of
from memopt.manifests.safetensors_header import read_header


class _UnitFiles(OpenFiles):
    """Some files of a release, for one thread."""

    def __init__(self, folder: Path, stamps: dict[str, FileStamp], names: Collection[str]) -> None:
        super().__init__()
        try:
            for name in names:
                self._descriptors[name] = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                if FileStamp.of(os.fstat(self._descriptors[name])) != stamps[name]:
                    raise _changed(name)
        except OSError as problem:
            self.close()
            raise read_error(problem, name) from None
        except BaseException:
            self.close()
            raise


class ReleaseReader:
    """The weight files `files` of the release in `folder`; a large one has more of them than a process may open.

    Raises MissingFileError, LayoutError (rank files that were swapped, by their headers), ContentError for another
    header than the ledger gives the file.
    """

    def __init__(self, folder: Path, files: Iterable[PlannedFile]) -> None:
        self._folder = folder
        self.stamps: dict[str, FileStamp] = {}
        for file in files:
            self.stamps[file.name] = self._check(file)
        self.stamps[LEDGER_NAME] = FileStamp.of(os.stat(folder / LEDGER_NAME))

    def _check(self, file: PlannedFile) -> FileStamp:
        header = file.header
        try:
            with open_regular(self._folder / file.name) as (descriptor, status):
                if read_exactly(descriptor, len(header), 0) == header:
                    if status.st_size == len(header) + file.data_size_bytes:
                        return FileStamp.of(status)
                    raise ContentError(
                        f"has {status.st_size:,} bytes, the ledger gives it {len(header) + file.data_size_bytes:,}",
                        file=file.name,
                        remedy="fetch the file again",
                    )
        except MissingFileError:
            place = rank_folder_of(file.name)
            if place is None:
                raise MissingFileError("is missing", file=file.name, remedy="fetch the release again") from None
            raise missing_rank(place.layout, place.rank, file.name) from None
        found = read_header(self._folder / file.name)
        swapped = place_problem(file.name, found.metadata)
        if swapped is not None:
            raise swapped
        held, named = set(found.tensors), set(file.layout)
        odd = min((tensor.name for tensor in held ^ named), default=None)
        raise ContentError(
            f"its header is not the one that {LEDGER_NAME} gives it",
            tensor=odd,
            file=file.name,
            remedy="fetch the file again",
        )

    def open_files(self, names: Collection[str]) -> _UnitFiles:
        """Reads from `names`; SourceChangedError if one was touched since it was checked."""
        return _UnitFiles(self._folder, self.stamps, names)

    def require_unchanged(self) -> None:
        """SourceChangedError if a file was touched since it was checked."""
        for name, stamp in self.stamps.items():
            try:
                found = FileStamp.of(os.stat(self._folder / name))
            except OSError as problem:
                raise read_error(problem, name) from None
            if found != stamp:
                raise _changed(name)

    def __enter__(self) -> ReleaseReader:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing stays open between units."""


def _changed(name: str) -> SourceChangedError:
    return SourceChangedError("was changed while it was read", file=name, remedy="use a release that stays still")
