"""What all steps of a calibration share: the source model, samples in batches, the store, ranks and threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from memopt.compressor.calibrate.expert_rounding import RoundingOptions
from memopt.compressor.calibrate.row_file import RowFile
from memopt.compressor.calibrate.run_sizes import RESULTS_AHEAD, RunSizes
from memopt.compressor.calibration_options import MIN_COVERAGE_SHARE, CalibrationOptions
from memopt.compressor.calibration_store import CalibrationStore
from memopt.compressor.evaluate.stored_model import StoredModel
from memopt.compressor.evaluate.window_rows import WindowBatch
from memopt.compressor.kv_cache_choice import KvCacheChoice
from memopt.runtime.model.model_config import ModelConfig
from memopt.runtime.parallel.communicator import Communicator
from memopt.runtime.weights.load_options import LoadOptions


@dataclass(frozen=True, slots=True)
class CalibrationRun:
    """`batches`: all samples; every rank has the same. `pool` has `num_workers` threads, each of one torch thread.

    `most_workers`: threads of the rank that has most of them; what all ranks have to plan alike follows from it.
    `kv_cache`: where its scales are to be measured, else None.
    """

    model: StoredModel
    options: CalibrationOptions
    load: LoadOptions
    store: CalibrationStore
    batches: tuple[WindowBatch, ...]
    communicator: Communicator
    pool: ThreadPoolExecutor
    num_workers: int
    most_workers: int
    kv_cache: KvCacheChoice | None = None

    @property
    def config(self) -> ModelConfig:
        """The model's."""
        return self.model.config

    @property
    def num_rows(self) -> int:
        """Tokens of all samples."""
        return sum(batch.num_rows for batch in self.batches)

    @property
    def sizes(self) -> RunSizes:
        """What its memory follows from, the same on all ranks."""
        return run_sizes(self.config, self.options, self.batches, self.most_workers)

    @property
    def rank(self) -> int:
        """This process's, from 0."""
        return self.communicator.rank

    @property
    def own_batches(self) -> tuple[WindowBatch, ...]:
        """The batches that this rank runs through layers."""
        return self.batches[share(len(self.batches), self.rank, self.communicator.num_ranks)]

    @property
    def ahead(self) -> int:
        """How many results may wait."""
        return self.num_workers + RESULTS_AHEAD

    @property
    def rounding(self) -> RoundingOptions:
        """For experts with tokens enough of their own."""
        return RoundingOptions(min_tokens=max(1, int(self.options.coverage_tokens * MIN_COVERAGE_SHARE)))

    def rows(
        self,
        name: str,
        num_columns: int | None = None,
        dtype: torch.dtype | None = None,
        *,
        is_hashed: bool = False,
    ) -> RowFile:
        """The store's file `name` with a row for every token; a hidden state unless told otherwise."""
        columns = self.config.hidden_size if num_columns is None else num_columns
        path = self.store.folder / name
        return RowFile(path, self.num_rows, columns, dtype or self.load.dtype, is_hashed=is_hashed)

    def barrier(self) -> None:
        """Wait for all ranks; PeerError when one has ended."""
        self.communicator.maximum(torch.zeros(1, dtype=torch.int64))

    def chunks(self, file: RowFile) -> Iterator[Tensor]:
        """All rows of `file`, batch after batch."""
        for batch in self.batches:
            yield file.read(batch.first_row, batch.num_rows)


def run_sizes(
    config: ModelConfig, options: CalibrationOptions, batches: Sequence[WindowBatch], num_workers: int
) -> RunSizes:
    """Of a run of `batches`, all samples', on `num_workers` threads of the rank that has most of them."""
    num_rows = sum(batch.num_rows for batch in batches)
    return RunSizes(
        num_rows,
        max(batch.num_rows for batch in batches),
        num_workers,
        config.moe.experts_per_token,
        min(options.coverage_tokens, num_rows),
        options.memory_bytes,
    )


def share(count: int, rank: int, num_ranks: int) -> slice:
    """The part of `count` things that is `rank`'s: contiguous, in the order of ranks, equal to within one."""
    return slice(count * rank // num_ranks, count * (rank + 1) // num_ranks)
