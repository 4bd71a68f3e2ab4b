"""Deterministic top-k: plain torch, written to be read. It defines the result."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.layout import F32_MAGNITUDE_MASK

# What positions past the selection hold.
NO_POSITION = -1


def order_keys(scores: Tensor) -> Tensor:
    """int32 keys in the order of float32 scores, any shape: -0 equals 0, and any NaN comes before everything."""
    bits = torch.where(scores == 0, 0.0, scores).view(torch.int32)
    keys = torch.where(bits < 0, bits ^ F32_MAGNITUDE_MASK, bits)
    return keys.masked_fill(torch.isnan(scores), torch.iinfo(torch.int32).min)


def top_k(scores: Tensor, num_tokens: Tensor, k: int, out: Tensor | None = None) -> Tensor:
    """Arguments as for `top_k.top_k`."""
    positions = torch.empty((scores.shape[0], k), dtype=torch.int32, device=scores.device) if out is None else out
    positions.fill_(NO_POSITION)
    for request, count in enumerate(num_tokens.tolist()):
        # A stable sort keeps equal keys in the order of their positions.
        order = torch.sort(order_keys(scores[request, :count]), descending=True, stable=True).indices
        chosen = order[:k].sort().values
        positions[request, : chosen.shape[0]] = chosen.to(torch.int32)
    return positions
