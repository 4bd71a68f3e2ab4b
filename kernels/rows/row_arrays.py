"""Tensors as the arrays that the numba row kernels take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def row_array(rows: Tensor) -> Any:
    """A CPU tensor's memory as a numpy array: bfloat16 as its bits (uint16), other types as they are."""
    return rows.view(torch.uint16).numpy() if rows.dtype == torch.bfloat16 else rows.numpy()
