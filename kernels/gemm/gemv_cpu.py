"""One BF16 row times a BF16 weight on the CPU; row_tiles.py and head products come here. The reference is torch's @."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from memopt.kernels import cpu_number, layout
from memopt.kernels.compile_cache import compiled, source_digest
from memopt.kernels.gemm import gemv_rows_cpu
from memopt.kernels.gemm.gemv_rows_cpu import multiply_heads, multiply_row
from memopt.kernels.kv_cache import kv_rows_cpu
from memopt.kernels.rows import row_values_cpu
from memopt.kernels.rows.row_arrays import new_rows, row_array

_SOURCES = (layout, cpu_number, kv_rows_cpu, row_values_cpu, gemv_rows_cpu)
# One thread multiplies. Weights above this are worth torch's threads where it has several.
MAX_SINGLE_THREAD_WEIGHTS = 1 << 17


@cache
def _sources_key() -> str:
    return source_digest(*(str(module.__file__) for module in _SOURCES), __file__)


@cache
def _row_entry() -> Callable[..., None]:
    """`multiply_row`, compiled on first use; cpu_entry.py says why it closes over a digest of its sources."""
    key = _sources_key()

    @compiled
    def multiply(*arguments: Any) -> Any:
        key  # noqa: B018 - makes it a closure variable
        return multiply_row(*arguments)

    return multiply


@cache
def _heads_entry() -> Callable[..., None]:
    """`multiply_heads`, compiled."""
    key = _sources_key()

    @compiled
    def multiply(*arguments: Any) -> Any:
        key  # noqa: B018 - makes it a closure variable
        return multiply_heads(*arguments)

    return multiply


def is_single_row(x: Tensor, weight: Tensor) -> bool:
    """Whether `x` and `weight`, BF16 on the CPU, are one row and a weight that one thread reads as fast as several."""
    return (
        x.shape[0] == 1
        and x.dtype == weight.dtype == torch.bfloat16
        and x.device.type == "cpu"
        and (weight.numel() <= MAX_SINGLE_THREAD_WEIGHTS or torch.get_num_threads() == 1)
    )


def row_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """[1, N] of x [1, K] and a contiguous weight [N, K], for which `is_single_row` holds; float32 sums."""
    product, bits = new_rows((1, weight.shape[0]), torch.bfloat16)
    _row_entry()(row_array(x.contiguous()), row_array(weight), bits)
    return product


def row_head_matmul(x: Tensor, weights: Tensor) -> Tensor:
    """[1, H, N] of x [1, H, K] and weights [H, K, N], each contiguous or the transpose of one; float32 sums."""
    is_transposed = not weights.is_contiguous()
    stored = weights.mT if is_transposed else weights
    product, bits = new_rows((1, weights.shape[0], weights.shape[2]), torch.bfloat16)
    _heads_entry()(row_array(x.contiguous()), row_array(stored.contiguous()), is_transposed, bits)
    return product
