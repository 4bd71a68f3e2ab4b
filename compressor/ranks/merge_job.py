"""Merging as a job: the ranks' slices are compared with the ledger and put together to hub files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from memopt.compressor.checkpoint.checkpoint import StoredTensor
from memopt.compressor.checkpoint.writer import TensorSink
from memopt.compressor.job import Advance, SourcePart, TensorReader
from memopt.compressor.ledger import TensorResult
from memopt.compressor.ranks.cut import Cut, CutKind, cut_of
from memopt.compressor.ranks.fan_out import shape_bytes
from memopt.compressor.ranks.layout import Layouts
from memopt.compressor.ranks.release_job import ReleaseJob
from memopt.compressor.ranks.released import ReleasedPlan, digests_of
from memopt.compressor.ranks.row_steps import STEP_SIZE_BYTES, row_steps
from memopt.compressor.ranks.shard_job import stored_tensors
from memopt.compressor.tensor_plan import OutputTensor, TensorPlan
from memopt.compressor.units import PlannedFile, Unit
from memopt.errors import ContentError, UsageError
from memopt.manifests.file_roles import LEDGER_NAME
from memopt.manifests.rank_folders import RankLayout


class MergeJob(ReleaseJob):
    """Puts the ranks of `released` together to hub files alone. UsageError if it has none; raises as ReleaseJob."""

    command = "merge"

    def __init__(self, released: ReleasedPlan) -> None:
        if released.layouts.ranks is None:
            raise UsageError(f"{released.folder} has no rank files", remedy="it is a hub release already")
        self._ranks = released.layouts.ranks
        super().__init__(released, Layouts())

    def source_files(self, unit: Unit) -> tuple[PlannedFile, ...]:
        return self.source_unit(unit).rank_files

    def worker(self, reader: TensorReader, unit: Unit, advance: Advance) -> MergeWorker:
        digests: dict[str, tuple[str, ...]] = {}
        for row in self._released.rows(self.source_unit(unit)):
            digests |= digests_of(row).ranks
        return MergeWorker(reader, self._ranks, self._slices(unit), digests, advance)

    def _slices(self, unit: Unit) -> dict[int, dict[str, StoredTensor]]:
        return {file.rank or 0: stored_tensors(file) for file in self.source_files(unit)}

    def source_parts(self, unit: Unit, rows: Sequence[Mapping[str, Any]]) -> Iterator[SourcePart]:
        source, slices = self.source_unit(unit), self._slices(unit)
        for plan, row in zip(source.tensors, self._released.rows(source), strict=True):
            digests = digests_of(row).ranks
            for output in plan.outputs:
                cut = cut_of(output, plan, self._ranks)
                for rank in cut.holders:
                    yield SourcePart(slices[rank][output.name], digests[output.name][cut.digest_index(rank)])


class MergeWorker:
    """Reads the slices of one tensor after another, compares each with its digest, and hands on the whole.

    `slices`: rank -> name -> where it lies. `digests`: SHA-256 (hex) of what the ranks store, see Cut.num_digests.
    """

    def __init__(
        self,
        reader: TensorReader,
        ranks: RankLayout,
        slices: Mapping[int, Mapping[str, StoredTensor]],
        digests: Mapping[str, tuple[str, ...]],
        advance: Advance,
    ) -> None:
        self._reader = reader
        self._ranks = ranks
        self._slices = slices
        self._digests = digests
        self._advance = advance

    def run(self, plan: TensorPlan, out: TensorSink) -> TensorResult:
        """Stream every output of `plan` into `out`. ContentError naming the slice that is not the ledger's."""
        for output in plan.outputs:
            cut = cut_of(output, plan, self._ranks)
            parts = [self._slices[rank][output.name] for rank in cut.holders]
            if cut.kind is CutKind.COLUMNS:
                self._merge_columns(output, cut, parts, out)
                continue
            for rank, part in zip(cut.holders, parts, strict=True):
                is_wanted = cut.kind is CutKind.ROWS or (rank == cut.holders[0] and cut.kind is not CutKind.SHAPE)
                self._read_slice(part, cut, rank, out if is_wanted else None)
            if cut.kind is CutKind.SHAPE:
                out.append(output.name, shape_bytes(output.dtype, plan.source.spec.shape))
        return TensorResult({})

    def _read_slice(self, part: StoredTensor, cut: Cut, rank: int, out: TensorSink | None) -> None:
        """Read a slice for its digest's sake, and hand it to `out` if it is wanted."""
        state = hashlib.sha256()
        for step in row_steps(part.shape, part.size_bytes):
            data = np.empty(step.size_bytes, np.uint8).data
            self._reader.read_into(part, step.start, data)
            state.update(data)
            if out is not None:
                out.append(part.name, data)
            self._advance(step.size_bytes)
        self._require(part, cut, rank, state.hexdigest())

    def _merge_columns(self, output: OutputTensor, cut: Cut, parts: Sequence[StoredTensor], out: TensorSink) -> None:
        states = [hashlib.sha256() for _ in parts]
        for step in row_steps(parts[0].shape, parts[0].size_bytes, max(1, STEP_SIZE_BYTES // len(parts))):
            rows = np.empty((step.count, len(parts), step.size_bytes // step.count), np.uint8)
            for number, part in enumerate(parts):
                piece = np.empty(step.size_bytes, np.uint8)
                self._reader.read_into(part, step.start, piece.data)
                states[number].update(piece.data)
                rows[:, number] = piece.reshape(step.count, -1)
                self._advance(step.size_bytes)
            out.append(output.name, rows.data)
        for rank, part, state in zip(cut.holders, parts, states, strict=True):
            self._require(part, cut, rank, state.hexdigest())

    def _require(self, part: StoredTensor, cut: Cut, rank: int, digest: str) -> None:
        if digest != self._digests[part.name][cut.digest_index(rank)]:
            raise ContentError(
                f"the slice of rank {rank} is not the one that {LEDGER_NAME} names",
                tensor=part.name,
                file=part.file,
                remedy="fetch that rank's files again",
            )
