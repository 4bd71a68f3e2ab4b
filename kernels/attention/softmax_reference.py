"""Attention of one request over rows that are already gathered: plain torch, written to be read."""

from __future__ import annotations

import torch
from torch import Tensor


def attend(query: Tensor, keys: Tensor, values: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """softmax(query @ keys.T * softmax_scale) @ values [H, V] and the log-sum-exp of the scores [H].

    `query` [H, D], `keys` [T, D], `values` [T, V], of one floating dtype, in which everything is computed. Zeros and
    -inf when T is 0.
    """
    if keys.shape[0] == 0:
        return values.new_zeros((query.shape[0], values.shape[1])), query.new_full((query.shape[0],), -torch.inf)
    scores = query @ keys.T * softmax_scale
    return torch.softmax(scores, dim=1) @ values, torch.logsumexp(scores, dim=1)


def compute_dtype(query: Tensor) -> torch.dtype:
    """float64 for float64 queries, else float32."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32
