"""What `accumulate_hessian` means: plain torch, a chunk's sum exact in float64, then two roundings."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from memopt.kernels.layout import HESSIAN_CHUNK_TOKENS


def accumulate_hessian_reference(
    hessian: Tensor, tokens: Tensor, expert_offsets: Tensor, *, chunk_tokens: int = HESSIAN_CHUNK_TOKENS
) -> None:
    """hessian[e] += X_e^T X_e, chunk after chunk: the chunk's product rounded to float32, then the sum.

    `hessian` float32 [E, K, K], `tokens` bfloat16 [T, K], `expert_offsets` int64 [E + 1]. Other implementations round
    within a chunk too: they may differ from this by chunk_tokens * 2**-24 of the sum of absolute products at most.
    """
    ends = expert_offsets.tolist()
    for expert, (first, end) in enumerate(itertools.pairwise(ends)):
        for start in range(first, end, chunk_tokens):
            chunk = tokens[start : min(start + chunk_tokens, end)].to(torch.float64)
            hessian[expert] += (chunk.T @ chunk).to(torch.float32)
