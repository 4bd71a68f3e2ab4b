"""A job: what fills the units of an output folder. Compressing, sharding and merging run in one pipeline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from memopt.compressor.checkpoint.checkpoint import StoredTensor
from memopt.compressor.checkpoint.file_stamp import FileStamp
from memopt.compressor.checkpoint.writer import TensorSink
from memopt.compressor.ledger import ErrorSummary, TensorResult
from memopt.compressor.metadata_files import MetadataFile
from memopt.compressor.output_folder import FinishedIdentity
from memopt.compressor.progress import ProgressCallback
from memopt.compressor.ranks.unit_digests import UnitDigests
from memopt.compressor.run_ranks import RunRanks
from memopt.compressor.tensor_plan import TensorPlan
from memopt.compressor.units import Unit
from memopt.manifests.file_roles import LEDGER_NAME
from memopt.manifests.release_description import RELEASE_NAME

# Called with the number of source bytes done; raises to stop the work.
Advance = Callable[[int], None]


class TensorReader(Protocol):
    """Positional reads of stored tensors."""

    def read_into(self, tensor: StoredTensor, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `offset` of `tensor`."""


class Source(Protocol):
    """The files that a job reads. `stamps`: of each, when the job began."""

    stamps: dict[str, FileStamp]

    def open_files(self, names: Collection[str]) -> AbstractContextManager[TensorReader]:
        """Reads from the files `names`, for one thread."""

    def require_unchanged(self) -> None:
        """SourceChangedError if a file was touched since the job began."""

    def __enter__(self) -> Source: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Worker(Protocol):
    """Does the work of one tensor after another of a unit."""

    def run(self, plan: TensorPlan, out: TensorSink) -> TensorResult:
        """Read `plan`'s source and hand its whole outputs to `out`."""


@dataclass(frozen=True)
class SourcePart:
    """A stored tensor that a job reads, and the SHA-256 (hex) that its bytes had."""

    tensor: StoredTensor
    sha256: str


class Job(ABC):
    """What is written to an output folder, and from what.

    `folder`: the source's. `units`: in order. `fingerprint`: hex, of everything that the run depends on.
    `finished`: how a finished release of this job describes itself.
    """

    folder: Path
    units: tuple[Unit, ...]
    fingerprint: str
    finished: FinishedIdentity
    # Whether nothing but its bytes can tell the source from another one.
    must_read_source_again: bool

    @property
    @abstractmethod
    def small_files(self) -> Sequence[MetadataFile]:
        """What is written before the weights."""

    @property
    def left_behind(self) -> tuple[str, ...]:
        """Files of the source that are not written, and that release.json does not list either."""
        return ()

    @abstractmethod
    def small_file(self, name: str) -> bytes:
        """The bytes of one of `small_files`."""

    @abstractmethod
    def ledger_size_bytes(self) -> int:
        """Exact size of ledger.jsonl."""

    @abstractmethod
    def open_source(self) -> Source:
        """Open what is read; raises as the reader does."""

    def prepare(  # noqa: B027
        self, state: Path, workers: int, progress: ProgressCallback | None, ranks: RunRanks
    ) -> None:
        """Whatever must be done before the units; its files, and those of an earlier run, are in folder `state`.

        All ranks call it together.
        """

    @abstractmethod
    def worker(self, reader: TensorReader, unit: Unit, advance: Advance) -> Worker:
        """A worker for the tensors of `unit`, for one thread."""

    @abstractmethod
    def rows(self, unit: Unit, results: Sequence[TensorResult], digests: UnitDigests) -> list[dict[str, Any]]:
        """The ledger's rows of `unit`. ContentError if what was written is not what the source's ledger says."""

    @abstractmethod
    def tail_lines(self) -> Iterator[bytes]:
        """The ledger's lines of tensors without outputs."""

    @abstractmethod
    def source_parts(self, unit: Unit, rows: Sequence[Mapping[str, Any]]) -> Iterator[SourcePart]:
        """What was read for `unit`, whose ledger rows are `rows`."""

    @abstractmethod
    def part_files(self, unit: Unit) -> Mapping[str, int]:
        """Source file -> bytes that are read from it for `unit`."""

    @abstractmethod
    def release(self, *, ledger_sha256: str, errors_by_role: Mapping[str, ErrorSummary]) -> bytes:
        """release.json's bytes."""

    @abstractmethod
    def release_size_bytes(self) -> int:
        """Exact size of release.json."""

    def input_size_bytes(self, units: Sequence[Unit] | None = None) -> int:
        """Bytes that are read for `units` (None: all)."""
        return sum(sum(self.part_files(unit).values()) for unit in (self.units if units is None else units))

    def scratch_size_bytes(self, state: Path) -> int:
        """Bytes that `prepare` is still to write below `state`, about, beside the planned files."""
        return 0

    def planned_sizes(self) -> dict[str, int]:
        """Every output file and its exact size in bytes."""
        return file_sizes(self.small_files, self.units, self.ledger_size_bytes(), self.release_size_bytes())


def file_sizes(
    small_files: Iterable[MetadataFile], units: Iterable[Unit], ledger_size_bytes: int, release_size_bytes: int
) -> dict[str, int]:
    """Every file of a release and its size in bytes."""
    sizes = {file.name: file.size_bytes for file in small_files}
    sizes |= {file.name: file.size_bytes for unit in units for file in unit.files}
    return sizes | {LEDGER_NAME: ledger_size_bytes, RELEASE_NAME: release_size_bytes}
