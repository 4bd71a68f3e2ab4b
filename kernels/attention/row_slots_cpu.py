"""Slots of a batch's requests on the CPU: of all their tokens, or of selected ones."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.attention.softmax_cpu import RowSlots
from memopt.kernels.layout import PADDING_SLOT, PAGE_TOKENS


def dense_row_slots(block_table: Tensor, num_tokens: Tensor) -> RowSlots:
    """All tokens of each request; `block_table` int32 [B, max_pages], `num_tokens` int32 [B]."""
    counts = num_tokens.tolist()
    positions = torch.arange(max(counts, default=0))
    pages = block_table[:, : -(-positions.shape[0] // PAGE_TOKENS)].to(torch.int64)
    slots = (pages[:, :, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten(1)[:, : positions.shape[0]]
    return RowSlots(slots.masked_fill_(positions >= num_tokens[:, None], PADDING_SLOT), counts)


def selected_row_slots(block_table: Tensor, positions: Tensor) -> RowSlots:
    """Those of each request's positions int32 [B, k] that are not negative, in their order."""
    is_padding = positions < 0
    counts = (positions.shape[1] - is_padding.sum(dim=1)).tolist()
    # top_k puts padding last; others may not.
    order = is_padding.to(torch.uint8).sort(dim=1, stable=True).indices
    chosen = positions.to(torch.int64).gather(1, order)[:, : max(counts, default=0)]
    kept = chosen.clamp(min=0)
    slots = block_table.to(torch.int64).gather(1, kept // PAGE_TOKENS) * PAGE_TOKENS + kept % PAGE_TOKENS
    return RowSlots(slots.masked_fill_(chosen < 0, PADDING_SLOT), counts)
