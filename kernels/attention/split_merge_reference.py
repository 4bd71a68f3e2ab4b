"""Merging the results of splits: plain torch, written to be read."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.attention.attention_output import AttentionOutput


def merge_splits(partial: Tensor, log_sum_exps: Tensor, out: AttentionOutput) -> AttentionOutput:
    """Fills `out` [B, H, V] from float32 `partial` [B, S, H, V] and `log_sum_exps` [B, S, H] of S disjoint splits.

    Each split is weighted by its share of the denominator, exp(lse_s - lse). A split without tokens has lse -inf and
    weighs nothing, whatever its partial result holds.
    """
    whole = torch.logsumexp(log_sum_exps, dim=1)
    weights = torch.where(torch.isneginf(log_sum_exps), 0.0, torch.exp(log_sum_exps - whole[:, None]))
    weighted = torch.where(weights[..., None] == 0, 0.0, partial * weights[..., None])
    out.output.copy_(weighted.sum(dim=1))
    out.log_sum_exp.copy_(whole)
    return out
