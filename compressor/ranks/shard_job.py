"""Sharding as a job: hub files are read once, compared with the ledger, and cut into rank files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from memopt.compressor.checkpoint.checkpoint import StoredTensor
from memopt.compressor.checkpoint.writer import TensorSink
from memopt.compressor.job import Advance, SourcePart, TensorReader
from memopt.compressor.ledger import TensorResult
from memopt.compressor.plan import require_ranks
from memopt.compressor.ranks.layout import Layouts
from memopt.compressor.ranks.release_job import ReleaseJob
from memopt.compressor.ranks.released import ReleasedPlan, stored_in
from memopt.compressor.ranks.row_steps import row_steps
from memopt.compressor.tensor_plan import TensorPlan
from memopt.compressor.units import PlannedFile, Unit
from memopt.errors import UsageError


def stored_tensors(file: PlannedFile) -> dict[str, StoredTensor]:
    """The tensors of `file` by name, as they lie in it."""
    data_start = file.size_bytes - file.data_size_bytes
    return {header.name: stored_in(header, file.name, data_start) for header in file.layout}


class ShardJob(ReleaseJob):
    """Cuts the hub files of `released`. UsageError if it has none, AlignmentError for what cannot be cut."""

    command = "shard"

    def __init__(self, released: ReleasedPlan, layouts: Layouts) -> None:
        if not released.layouts.writes_hub:
            raise UsageError(
                f"{released.folder} has no hub files, only {', '.join(released.layouts.names)}",
                remedy=f"put its ranks together first: `memopt merge {released.folder} OUT`",
            )
        if layouts.ranks is None:
            raise UsageError("there is nothing to shard for", remedy="give a tensor- or expert-parallel degree")
        require_ranks((plan for unit in released.units for plan in unit.tensors), layouts.ranks)
        super().__init__(released, layouts)

    def source_files(self, unit: Unit) -> tuple[PlannedFile, ...]:
        return (self.source_unit(unit).hub_file,)

    def worker(self, reader: TensorReader, unit: Unit, advance: Advance) -> CopyWorker:
        return CopyWorker(reader, stored_tensors(unit.hub_file), advance)

    def source_parts(self, unit: Unit, rows: Sequence[Mapping[str, Any]]) -> Iterator[SourcePart]:
        parts = stored_tensors(unit.hub_file)
        for row in rows:
            for entry in row["outputs"]:
                yield SourcePart(parts[entry["name"]], entry["sha256"])


class CopyWorker:
    """Hands stored tensors on as they are. Whoever takes them compares their digests with the ledger."""

    def __init__(self, reader: TensorReader, parts: Mapping[str, StoredTensor], advance: Advance) -> None:
        self._reader = reader
        self._parts = parts
        self._advance = advance

    def run(self, plan: TensorPlan, out: TensorSink) -> TensorResult:
        """Stream every output of `plan` into `out`."""
        for output in plan.outputs:
            part = self._parts[output.name]
            for step in row_steps(part.shape, part.size_bytes):
                data = np.empty(step.size_bytes, np.uint8).data
                self._reader.read_into(part, step.start, data)
                out.append(output.name, data)
                self._advance(step.size_bytes)
        return TensorResult({})
