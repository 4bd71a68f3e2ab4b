"""What decode attention returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionOutput:
    """`output` [B, heads, value size] in the query's dtype; `log_sum_exp` float32 [B, heads].

    `log_sum_exp` is the natural logarithm of the softmax's denominator: with it, results over disjoint tokens can be
    merged. A request without tokens has zeros and -inf.
    """

    output: Tensor
    log_sum_exp: Tensor


def new_output(query: Tensor, value_size: int) -> AttentionOutput:
    """An uninitialised result for `query` [B, heads, .]."""
    shape = query.shape[:2]
    return AttentionOutput(
        torch.empty((*shape, value_size), dtype=query.dtype, device=query.device),
        torch.empty(shape, dtype=torch.float32, device=query.device),
    )
