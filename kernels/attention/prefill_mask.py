"""Which keys a prompt's queries attend to."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_mask(positions: Tensor, first_key: int, num_keys: int) -> Tensor:
    """bool [R, num_keys]: whether a key at first_key + column is at or before a query's position, int64 [R]."""
    keys = torch.arange(first_key, first_key + num_keys, device=positions.device)
    return keys[None, :] <= positions[:, None]


def selection_mask(selected: Tensor, num_keys: int) -> Tensor:
    """bool [R, num_keys] from positions int32 [R, k]; negative ones and those past num_keys select nothing."""
    is_key = (selected >= 0) & (selected < num_keys)
    columns = torch.where(is_key, selected, num_keys).to(torch.int64)
    mask = torch.zeros((selected.shape[0], num_keys + 1), dtype=torch.bool, device=selected.device)
    return mask.scatter_(1, columns, True)[:, :num_keys]
