"""The numbers that a calibration's memory follows from; all of them are known before anything is written."""

from __future__ import annotations

from dataclasses import dataclass

# Results of forward passes that wait to be summed, for each thread.
RESULTS_AHEAD = 1


@dataclass(frozen=True, slots=True)
class RunSizes:
    """`num_rows` tokens of all samples, at most `batch_tokens` at a time, on `num_workers` threads of the rank that has
    most of them. `forced_tokens`: the most that an expert gets of others. `memory_bytes`: the budget.
    """

    num_rows: int
    batch_tokens: int
    num_workers: int
    experts_per_token: int
    forced_tokens: int
    memory_bytes: int
