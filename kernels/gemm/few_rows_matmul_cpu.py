"""A few BF16 rows times a small BF16 weight on the CPU; row_tiles.py and head products come here.

The reference is torch's @, of whose time for such a product 16 us are its start (oneDNN, torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from memopt.kernels import cpu_number, layout
from memopt.kernels.compile_cache import compiled, source_digest
from memopt.kernels.gemm import few_rows_cpu
from memopt.kernels.gemm.few_rows_cpu import multiply_few_heads, multiply_few_rows
from memopt.kernels.kv_cache import kv_rows_cpu
from memopt.kernels.rows import row_values_cpu
from memopt.kernels.rows.row_arrays import new_rows, row_array

_SOURCES = (layout, cpu_number, kv_rows_cpu, row_values_cpu, few_rows_cpu)
# Up to here one thread is as fast here as torch, measured at 2 to 16 rows of 128 and 256 elements (AMD EPYC, Zen 4):
# torch has BF16 products, of twice the speed, and needs 16 us to begin.
MAX_PRODUCTS = 5 << 17


@cache
def _sources_key() -> str:
    return source_digest(*(str(module.__file__) for module in _SOURCES), __file__)


@cache
def _rows_entry() -> Callable[..., None]:
    """`multiply_few_rows`, compiled on first use; cpu_entry.py says why it closes over a digest of its sources."""
    key = _sources_key()

    @compiled
    def multiply(*arguments: Any) -> Any:
        key  # noqa: B018 - makes it a closure variable
        return multiply_few_rows(*arguments)

    return multiply


@cache
def _heads_entry() -> Callable[..., None]:
    """`multiply_few_heads`, compiled."""
    key = _sources_key()

    @compiled
    def multiply(*arguments: Any) -> Any:
        key  # noqa: B018 - makes it a closure variable
        return multiply_few_heads(*arguments)

    return multiply


def is_small_product(x: Tensor, weight: Tensor) -> bool:
    """Whether `x` [R, ..] and `weight`, BF16 on the CPU, are so small that torch's product is mostly its own start."""
    return (
        0 < x.shape[0] * weight.numel() <= MAX_PRODUCTS
        and x.dtype == weight.dtype == torch.bfloat16
        and x.device.type == "cpu"
    )


def few_rows_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """[M, N] of x [M, K] and a contiguous weight [N, K], for which `is_small_product` holds; float32 sums."""
    product, bits = new_rows((x.shape[0], weight.shape[0]), torch.bfloat16)
    _rows_entry()(row_array(x.contiguous()), row_array(weight), bits)
    return product


def few_rows_head_matmul(x: Tensor, weights: Tensor) -> Tensor:
    """[M, H, N] of x [M, H, K] and weights [H, K, N], each contiguous or the transpose of one; float32 sums."""
    is_transposed = not weights.is_contiguous()
    stored = weights.mT if is_transposed else weights
    product, bits = new_rows((x.shape[0], weights.shape[0], weights.shape[2]), torch.bfloat16)
    _heads_entry()(row_array(x.contiguous()), row_array(stored.contiguous()), is_transposed, bits)
    return product
