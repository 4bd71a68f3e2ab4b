"""Compiles the loops of layer_rows_cpu.py on first use, and calls them with tensors; runtime/model decides when."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memopt.kernels import cpu_number, layout
from memopt.kernels.compile_cache import compiled, source_digest
from memopt.kernels.kv_cache import kv_rows_cpu
from memopt.kernels.layout import MLA_KEY_SIZE, MLA_LATENT_SIZE
from memopt.kernels.rows import layer_rows_cpu, row_values_cpu
from memopt.kernels.rows.layer_rows_cpu import key_rows, norm_rows, rotate_heads, silu_mul_rows
from memopt.kernels.rows.row_arrays import new_rows, row_array

_SOURCES = (layout, cpu_number, kv_rows_cpu, row_values_cpu, layer_rows_cpu)
_TYPES = (torch.bfloat16, torch.float32)


@cache
def _sources_key() -> str:
    """The digest that every entry closes over; cpu_entry.py says why."""
    return source_digest(*(str(module.__file__) for module in _SOURCES), __file__)


@cache
def _norm_entry() -> Callable[..., None]:
    key = _sources_key()

    @compiled
    def norm(*arguments: Any) -> Any:
        key  # noqa: B018 - makes it a closure variable
        return norm_rows(*arguments)

    return norm


@cache
def _rotate_entry() -> Callable[..., None]:
    key = _sources_key()

    @compiled
    def rotate(*arguments: Any) -> Any:
        key  # noqa: B018 - makes it a closure variable
        return rotate_heads(*arguments)

    return rotate


@cache
def _silu_mul_entry() -> Callable[..., None]:
    key = _sources_key()

    @compiled
    def silu_mul(*arguments: Any) -> Any:
        key  # noqa: B018 - makes it a closure variable
        return silu_mul_rows(*arguments)

    return silu_mul


@cache
def _key_entry() -> Callable[..., None]:
    key = _sources_key()

    @compiled
    def keys(*arguments: Any) -> Any:
        key  # noqa: B018 - makes it a closure variable
        return key_rows(*arguments)

    return keys


def has_row_kernels(x: Tensor) -> bool:
    """Whether rows of `x` are computed here: BF16 or float32 on the CPU."""
    return x.device.type == "cpu" and x.dtype in _TYPES


def rms_norm_on_cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As runtime/model/norms.py `rms_norm`, for x and weight of one type that `has_row_kernels`."""
    # Contiguous: for strided rows numba compiles another loop, whose sum may be in another order.
    rows = x.contiguous().view(-1, weight.shape[0])
    out, array = new_rows(tuple(rows.shape), x.dtype)
    _norm_entry()(row_array(rows), row_array(weight), np.float32(eps), array)
    return out.view(x.shape)


def rotate_on_cpu(x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool, *, out_size: int | None = None) -> Tensor:
    """As runtime/model/rope.py `apply_rope`, for x [R, heads, size] that `has_row_kernels`, strided as it may be.

    What a head has behind the pairs of cos and sin stays; zeros follow up to `out_size`, if given.
    """
    out, array = new_rows((*x.shape[:2], out_size or x.shape[2]), x.dtype)
    _rotate_entry()(row_array(x), cos.numpy(), sin.numpy(), is_interleaved, array)
    return out


def silu_mul_on_cpu(gate_up: Tensor, rounded_to: torch.dtype) -> Tensor:
    """As gemm/silu_mul.py, for gate_up [T, 2 * I] that `has_row_kernels`."""
    out, array = new_rows((gate_up.shape[0], gate_up.shape[1] // 2), rounded_to)
    _silu_mul_entry()(row_array(gate_up.contiguous()), array)
    return out


def mla_keys_on_cpu(
    kv: Tensor, norm: Tensor, eps: float, cos: Tensor, sin: Tensor, is_interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Latents [R, 512] and ropes [R, 64], padded with zeros, of kv_a_proj's rows [R, latent + rope] on the CPU."""
    out, array = new_rows((kv.shape[0], MLA_KEY_SIZE), kv.dtype)
    _key_entry()(
        row_array(kv.contiguous()), row_array(norm), np.float32(eps), cos.numpy(), sin.numpy(), is_interleaved,
        MLA_LATENT_SIZE, array,
    )  # fmt: skip
    return out[:, :MLA_LATENT_SIZE], out[:, MLA_LATENT_SIZE:]
