"""Windows of tokens as one step of the runtime: every window a prompt of its own, with pages of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memopt.kernels.layout import PAGE_TOKENS
from memopt.runtime.kv.layer_kv import DUMMY_PAGE
from memopt.runtime.model.step_rows import PrefillChunk, StepRows

if TYPE_CHECKING:
    from memopt.compressor.evaluate.token_windows import Window


@dataclass(frozen=True, slots=True)
class WindowBatch:
    """Windows that run together: numbers `first` to `first + len(windows)`, whose tokens are rows `first_row` on."""

    first: int
    first_row: int
    windows: tuple[Window, ...]

    @property
    def num_rows(self) -> int:
        """Tokens of all its windows."""
        return sum(len(window.ids) for window in self.windows)

    @property
    def num_pages(self) -> int:
        """Pages that its windows take, the dummy page not counted."""
        return sum(pages_of(len(window.ids)) for window in self.windows)


def pages_of(num_tokens: int) -> int:
    """Pages that hold `num_tokens`."""
    return -(-num_tokens // PAGE_TOKENS)


def batches(windows: Sequence[Window], batch_tokens: int) -> tuple[WindowBatch, ...]:
    """Consecutive windows together until another one would pass `batch_tokens`; a longer window is a batch alone."""
    found: list[WindowBatch] = []
    first, first_row = 0, 0
    while first < len(windows):
        after, num_rows = first + 1, len(windows[first].ids)
        while after < len(windows) and num_rows + len(windows[after].ids) <= batch_tokens:
            num_rows += len(windows[after].ids)
            after += 1
        found.append(WindowBatch(first, first_row, tuple(windows[first:after])))
        first, first_row = after, first_row + num_rows
    return tuple(found)


def step_rows(batch: WindowBatch, device: str) -> StepRows:
    """The batch's rows on `device`: window after window, positions from 0, pages from the one after the dummy page."""
    import torch

    longest = max(len(window.ids) for window in batch.windows)
    table = torch.full((batch.num_rows, pages_of(longest)), DUMMY_PAGE, dtype=torch.int32)
    positions: list[torch.Tensor] = []
    slots: list[torch.Tensor] = []
    chunks: list[PrefillChunk] = []
    row, page = 0, DUMMY_PAGE + 1
    for window in batch.windows:
        count = len(window.ids)
        position = torch.arange(count)
        table[row : row + count, : pages_of(count)] = torch.arange(page, page + pages_of(count), dtype=torch.int32)
        positions.append(position)
        slots.append(page * PAGE_TOKENS + position)
        chunks.append(PrefillChunk(row, count, 0))
        row, page = row + count, page + pages_of(count)
    place = torch.cat(positions)
    ids = torch.cat([torch.from_numpy(window.ids) for window in batch.windows])
    return StepRows(
        token_ids=ids.to(device),
        positions=place.to(device),
        slots=torch.cat(slots).to(device),
        block_table=table.to(device),
        num_tokens=(place + 1).to(torch.int32).to(device),
        chunks=tuple(chunks),
        longest=longest,
    )
