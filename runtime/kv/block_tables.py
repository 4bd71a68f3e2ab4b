"""The pages of every running request, on the device: what attention reads, and what the tag check compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memopt.errors import CapacityError, UsageError
from memopt.kernels.layout import NO_TAG
from memopt.runtime.kv.held_page import HeldPage
from memopt.runtime.kv.layer_kv import DUMMY_PAGE


class BlockTables:
    """A row a running request. `pages` and `expected` are written when a page is added or a row is given up only.

    `pages` int32 [max_requests, max_pages]: page ids in the order of the sequence, DUMMY_PAGE behind the last.
    `expected` int64 [max_requests, max_pages]: the tags that the pages had when they were added, else NO_TAG.
    `num_pages` int32 [max_requests]: pages of each row that the coming step reads (`set_reads`), 0 for rows that have
    no part in it. From the host, not from the rows: so a page that was never written into its row is missed.
    These stay the same tensors: `tracker.check(tables.pages, tables.num_pages, tables.expected)` needs no gather.
    Rows are written on the current stream, before the step that reads them.
    """

    def __init__(self, max_requests: int, max_pages: int, device: torch.device | str) -> None:
        self.pages = torch.full((max_requests, max_pages), DUMMY_PAGE, dtype=torch.int32, device=device)
        self.expected = torch.full((max_requests, max_pages), NO_TAG, dtype=torch.int64, device=device)
        self.num_pages = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self._is_on_cpu = self.pages.device.type == "cpu"
        # On the CPU, numpy writes to the same memory in a tenth of the time.
        self._targets: tuple[Any, Any, Any] = (self.pages, self.expected, self.num_pages)
        if self._is_on_cpu:
            self._targets = (self.pages.numpy(), self.expected.numpy(), self.num_pages.numpy())
        self._free_rows = list(range(max_requests))[::-1]
        self._lengths: dict[int, int] = {}
        self._reads: dict[int, int] = {}

    @property
    def max_pages(self) -> int:
        """The longest sequence, in pages."""
        return self.pages.shape[1]

    def add_row(self) -> int:
        """An empty row for a request. CapacityError if all are in use."""
        if not self._free_rows:
            raise CapacityError(
                f"all {self.pages.shape[0]} rows of the block table are in use", remedy="raise max_requests"
            )
        row = self._free_rows.pop()
        self._lengths[row] = 0
        return row

    def length(self, row: int) -> int:
        """Pages in the row. UsageError for a row that is not in use."""
        if row not in self._lengths:
            raise UsageError(f"row {row} of the block table is not in use")
        return self._lengths[row]

    def append(self, row: int, held: HeldPage) -> None:
        """One more page at the end of the row."""
        self.extend(row, (held,))

    def extend(self, row: int, held_pages: Sequence[HeldPage]) -> None:
        """More pages at the end of the row. CapacityError if the row is too short, UsageError if it is not in use."""
        start = self.length(row)
        end = start + len(held_pages)
        if end > self.max_pages:
            raise CapacityError(
                f"row {row} of the block table holds {self.max_pages} pages, {end} are needed",
                remedy="raise max_tokens",
            )
        pages, expected, _ = self._targets
        pages[row, start:end] = self._values([held.page for held in held_pages], torch.int32)
        expected[row, start:end] = self._values([held.tag for held in held_pages], torch.int64)
        self._lengths[row] = end

    def drop_row(self, row: int) -> None:
        """Gives the row up: it reads as DUMMY_PAGE. UsageError if it is not in use."""
        end = self.length(row)
        pages, expected, _ = self._targets
        pages[row, :end] = DUMMY_PAGE
        expected[row, :end] = NO_TAG
        del self._lengths[row]
        self._free_rows.append(row)

    def set_reads(self, num_pages: Mapping[int, int]) -> None:
        """Row -> pages that the coming step reads of it; the other rows are not checked. Needed by the check alone.

        Nothing is written when the step before read as many, as most decode steps do.
        """
        if num_pages == self._reads:
            return
        self._reads = dict(num_pages)
        counts = [0] * self.pages.shape[0]
        for row, count in num_pages.items():
            counts[row] = count
        self._targets[2][:] = self._values(counts, torch.int32)

    def gather(self, rows: Tensor, num_columns: int, flags: Tensor | None = None) -> Tensor:
        """Block table int32 [R, num_columns] of a step's rows (int64 [R], row numbers, repeated as needed).

        `flags` int32 [max_requests] of the tag check: a flagged row reads as DUMMY_PAGE, decided on the device, so
        that no request ever attends to another's pages.
        """
        table = self.pages[:, :num_columns].index_select(0, rows)
        if flags is None:
            return table
        return table.masked_fill_(flags.index_select(0, rows).ne(0)[:, None], DUMMY_PAGE)

    def _values(self, numbers: list[int], dtype: torch.dtype) -> Any:
        if self._is_on_cpu:
            return numbers
        return torch.tensor(numbers, dtype=dtype).to(self.pages.device, non_blocking=True)
