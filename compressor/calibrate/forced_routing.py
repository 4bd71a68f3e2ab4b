"""Tokens for experts that too few tokens chose: whose, and which.

Every such expert gets tokens spread evenly over all samples, at places of its own, so that the load is balanced
(AutoRound's forced pass has this idea); what it computes of them is used for statistics alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Fractional part of the golden ratio: multiples of it lie apart from each other (Knuth, volume 3, 6.4).
_GOLDEN = 0.6180339887498949
# Rows that are looked at for each one that is wanted: some of them chose the expert by themselves.
CANDIDATES_A_ROW = 4


def forced_rows(expert: int, num_wanted: int, num_rows: int) -> Tensor:
    """int64 [N], ascending: rows of `num_rows` that may go to `expert`, more than `num_wanted`, or all there are."""
    count = min(num_rows, CANDIDATES_A_ROW * num_wanted)
    if count < 1:
        return torch.empty(0, dtype=torch.int64)
    start = (expert * _GOLDEN) % 1
    return torch.tensor([int((number + start) * num_rows / count) for number in range(count)], dtype=torch.int64)


def without_own(expert_ids: Tensor, expert: int, num_wanted: int) -> Tensor:
    """int64 [M], at most `num_wanted`: rows whose own choices `expert_ids` [N, k] lack `expert`, evenly taken."""
    left = (expert_ids != expert).all(dim=1).nonzero()[:, 0]
    if len(left) <= num_wanted:
        return left
    return left[torch.arange(num_wanted) * len(left) // max(num_wanted, 1)]
