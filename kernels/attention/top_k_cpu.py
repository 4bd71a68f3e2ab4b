"""Deterministic top-k on the CPU: torch's partial selection over keys that are all different."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.attention.top_k_reference import NO_POSITION, order_keys
from memopt.kernels.layout import F32_BITS

# Rows whose keys are made at once: 32 MB of int64 at 64K tokens.
BLOCK_ROWS = 64


def top_k(scores: Tensor, num_tokens: Tensor, k: int, out: Tensor | None = None) -> Tensor:
    """Arguments as for `top_k.top_k`."""
    positions = torch.empty((scores.shape[0], k), dtype=torch.int32) if out is None else out
    positions.fill_(NO_POSITION)
    for first in range(0, scores.shape[0], BLOCK_ROWS):
        rows = slice(first, first + BLOCK_ROWS)
        counts = num_tokens[rows, None]
        width = int(counts.max())
        num_chosen = min(k, width)
        places = torch.arange(width)
        # The score's key above, the distance from the end below: of equal scores the first position has the larger key.
        keys = order_keys(scores[rows, :width]).to(torch.int64) << F32_BITS
        keys += width - 1 - places
        keys.masked_fill_(places >= counts, torch.iinfo(torch.int64).min)
        chosen = torch.topk(keys, num_chosen, dim=1, sorted=False).indices
        # What is past a row's tokens stands last, and is none.
        chosen = torch.where(chosen < counts, chosen, width).sort(dim=1).values
        positions[rows, :num_chosen] = chosen.masked_fill_(chosen == width, NO_POSITION).to(torch.int32)
    return positions
