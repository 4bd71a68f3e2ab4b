"""Turns a plan into the rows of a forward pass: token ids from the host, pages from the device's tables.

Where a token's keys go is computed on the device, from the very table entries that the tag check saw. Rows of a request
that the check flagged read the dummy page and write nowhere; the host learns of it only with the sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from memopt.kernels.kv_cache.page_tags_reference import PageTagCheck
from memopt.kernels.layout import PAGE_TOKENS
from memopt.runtime.engine.admission import pages_for
from memopt.runtime.engine.request import Request
from memopt.runtime.engine.step_plan import StepPlan
from memopt.runtime.integrity.tracker import PageTracker
from memopt.runtime.kv.block_tables import BlockTables
from memopt.runtime.kv.layer_kv import DUMMY_PAGE
from memopt.runtime.model.step_rows import PrefillChunk, StepRows
from memopt.runtime.parallel.communicator import Communicator

# A slot that no store writes to.
NO_SLOT = -1
# Stands for a following token that is not known before the step has sampled it.
NOT_YET_KNOWN = -1


@dataclass(frozen=True, slots=True)
class BuiltStep:
    """Rows, and which of them are sampled.

    `sampled_rows` int64 [S], in the order of the plan's requests, None when those are all rows in order.
    `check`: flags over all ranks, one entry a row of the tables, None when nobody checks. `next_tokens` int64 [R]: the
    token after each row's, NOT_YET_KNOWN where it is to be sampled; None unless asked for.
    """

    rows: StepRows
    sampled_rows: Tensor | None
    check: PageTagCheck | None
    next_tokens: Tensor | None


def build_step(
    plan: StepPlan,
    tables: BlockTables,
    tracker: PageTracker,
    communicator: Communicator,
    *,
    needs_next_tokens: bool = False,
) -> BuiltStep:
    """The forward pass of `plan`: prefill rows first, request after request, then the decode rows."""
    order = _row_order(plan)
    device = tables.pages.device
    host = torch.tensor([order.token_ids, order.positions, order.table_rows], dtype=torch.int64)
    token_ids, positions, table_rows = host.to(device, non_blocking=True).unbind(0)
    longest = max(item.first_position + item.num_rows for item in plan.scheduled)
    check = _checked(order, tables, tracker, communicator) if tracker.is_checking else None
    table = tables.gather(table_rows, pages_for(longest), None if check is None else check.flags)
    page = table.gather(1, (positions // PAGE_TOKENS)[:, None]).squeeze(1).to(torch.int64)
    slots = page * PAGE_TOKENS + positions % PAGE_TOKENS
    if check is not None:
        slots = slots.masked_fill_(page == DUMMY_PAGE, NO_SLOT)
    rows = StepRows(token_ids, positions, slots, table, (positions + 1).to(torch.int32), order.chunks, longest)
    sampled = None
    if order.sampled_rows != list(range(rows.num_rows)):
        sampled = torch.tensor(order.sampled_rows, dtype=torch.int64).to(device, non_blocking=True)
    next_tokens = None
    if needs_next_tokens:
        next_tokens = torch.tensor(order.next_tokens, dtype=torch.int64).to(device, non_blocking=True)
    return BuiltStep(rows, sampled, check, next_tokens)


@dataclass(slots=True)
class _RowOrder:
    """What each row of the step is, on the host."""

    token_ids: list[int]
    positions: list[int]
    table_rows: list[int]
    next_tokens: list[int]
    sampled_rows: list[int]
    chunks: tuple[PrefillChunk, ...]

    def add(self, request: Request, start: int, stop: int) -> None:
        """Rows of the positions `start` to `stop`."""
        num_known = len(request.tokens)
        for position in range(start, stop):
            self.token_ids.append(request.token_at(position))
            following = position + 1
            self.next_tokens.append(request.tokens[following] if following < num_known else NOT_YET_KNOWN)
        self.positions += range(start, stop)
        row = DUMMY_PAGE if request.table_row is None else request.table_row
        self.table_rows += [row] * (stop - start)


def _row_order(plan: StepPlan) -> _RowOrder:
    order = _RowOrder([], [], [], [], [], ())
    chunks: list[PrefillChunk] = []
    ends: list[int] = []
    for item in plan.scheduled:
        if item.num_prefill_rows:
            chunks.append(PrefillChunk(len(order.positions), item.num_prefill_rows, item.first_position))
            order.add(item.request, item.first_position, item.first_position + item.num_prefill_rows)
        ends.append(len(order.positions))
    order.chunks = tuple(chunks)
    for item, end in zip(plan.scheduled, ends, strict=True):
        if item.num_rows > item.num_prefill_rows:
            stop = item.first_position + item.num_rows
            order.add(item.request, item.first_position + item.num_prefill_rows, stop)
            end = len(order.positions)
        order.sampled_rows += range(end - item.num_samples, end)
    return order


def _checked(
    order: _RowOrder, tables: BlockTables, tracker: PageTracker, communicator: Communicator
) -> PageTagCheck | None:
    """Flags of all rows of the tables, the largest of all ranks; None when all is known to be well."""
    # A request's positions rise: its last one stays.
    tables.set_reads(
        {row: position // PAGE_TOKENS + 1 for row, position in zip(order.table_rows, order.positions, strict=True)}
    )
    check = tracker.check(tables.pages, tables.num_pages, tables.expected)
    if communicator.num_ranks == 1:
        return None if tracker.is_known_clean else check
    if check is not None:
        # One message for both: all ranks then abort the same requests and quarantine the same pages.
        check = PageTagCheck(*communicator.maximum(torch.stack((check.flags, check.first_mismatch))).unbind(0))
    return check
