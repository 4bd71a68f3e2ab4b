"""Deterministic top-k on the CPU: torch's partial selection over keys that are all different."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.attention.top_k_reference import NO_POSITION, order_keys
from memopt.kernels.layout import F32_BITS


def top_k(scores: Tensor, num_tokens: Tensor, k: int, out: Tensor | None = None) -> Tensor:
    """Arguments as for `top_k.top_k`."""
    positions = torch.empty((scores.shape[0], k), dtype=torch.int32) if out is None else out
    positions.fill_(NO_POSITION)
    for request, count in enumerate(num_tokens.tolist()):
        # The score's key above, the distance from the end below: of equal scores the first position has the larger key.
        keys = order_keys(scores[request, :count]).to(torch.int64) << F32_BITS
        keys += torch.arange(count - 1, -1, -1)
        chosen = torch.topk(keys, min(k, count), sorted=False).indices.sort().values
        positions[request, : chosen.shape[0]] = chosen.to(torch.int32)
    return positions
