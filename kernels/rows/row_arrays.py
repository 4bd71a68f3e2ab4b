"""Tensors as the arrays that the numba row kernels take."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def row_array(rows: Tensor) -> Any:
    """A CPU tensor's memory as a numpy array: bfloat16 as its bits (uint16), other types as they are."""
    return rows.view(torch.uint16).numpy() if rows.dtype == torch.bfloat16 else rows.numpy()


def new_rows(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Any]:
    """An uninitialized CPU tensor, BF16 or float32, and its memory as `row_array` gives it.

    BF16 comes from numpy, in half the time. float32 is torch's, which begins at a whole vector: MKL's sums hang on it.
    """
    if dtype == torch.bfloat16:
        bits = np.empty(shape, np.uint16)
        return torch.from_numpy(bits).view(torch.bfloat16), bits
    rows = torch.empty(shape, dtype=dtype)
    return rows, rows.numpy()
