"""Hessians on a CPU: torch's float32 products over strips of the upper triangle, mirrored."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from memopt.kernels.calibration.float32_matmul import ieee_float32_matmul
from memopt.kernels.layout import HESSIAN_CHUNK_TOKENS

# Rows of the Hessian computed at a time: what is computed twice is the lower half of such squares on the diagonal.
STRIP_ROWS = 512


def accumulate_hessian_cpu(
    hessian: Tensor, tokens: Tensor, expert_offsets: Tensor, *, chunk_tokens: int = HESSIAN_CHUNK_TOKENS
) -> None:
    """hessian[e] += X_e^T X_e in place, as `accumulate_hessian` has it; same arguments as the reference.

    Working memory: one chunk as float32, and one strip of sums. The same bits from run to run with the same number of
    torch threads.
    """
    ends = expert_offsets.tolist()
    size = tokens.shape[1]
    with ieee_float32_matmul():
        for expert, (first, end) in enumerate(itertools.pairwise(ends)):
            for start in range(first, end, chunk_tokens):
                chunk = tokens[start : min(start + chunk_tokens, end)].to(torch.float32)
                for row in range(0, size, STRIP_ROWS):
                    strip = chunk[:, row : row + STRIP_ROWS].T @ chunk[:, row:]
                    _add_strip(hessian[expert], row, strip)


def _add_strip(hessian: Tensor, row: int, strip: Tensor) -> None:
    """Adds sums [rows, columns] from (`row`, `row`) on and mirrors them.

    Of the square on the diagonal only the upper half counts.
    """
    rows, columns = strip.shape
    square = strip[:, :rows]
    strip[:, :rows] = square.triu() + square.triu(1).T
    hessian[row : row + rows, row:] += strip
    if columns > rows:
        hessian[row + rows :, row : row + rows] = hessian[row : row + rows, row + rows :].T
