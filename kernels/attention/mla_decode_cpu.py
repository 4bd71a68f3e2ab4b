"""MLA decode on the CPU, dense and over selected tokens: float32 math of mla_rows_cpu.py, a request at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memopt.errors import UsageError
from memopt.kernels import cpu_number, layout
from memopt.kernels.attention import mla_rows_cpu
from memopt.kernels.attention.attention_output import AttentionOutput
from memopt.kernels.attention.mla_rows_cpu import attend_rows
from memopt.kernels.compile_cache import compiled, source_digest
from memopt.kernels.kv_cache import kv_rows_cpu
from memopt.kernels.kv_cache.kv_offsets import flat_elements
from memopt.kernels.kv_formats import FP8_DS_MLA, KvFormat
from memopt.kernels.layout import (
    DS_MLA_ROPE_OFFSET_BYTES,
    DS_MLA_SCALE_GROUP,
    DS_MLA_SCALES_OFFSET_BYTES,
    MLA_LATENT_SIZE,
)
from memopt.kernels.rows import row_values_cpu
from memopt.kernels.rows.row_arrays import new_rows, row_array

_SOURCES = (layout, cpu_number, kv_rows_cpu, row_values_cpu, mla_rows_cpu)
_ONE = np.ones(1, dtype=np.float32)


@cache
def _attend_entry() -> Callable[..., int]:
    """`attend_rows`, compiled on first use; cpu_entry.py says why it closes over a digest of its sources."""
    key = source_digest(*(str(module.__file__) for module in _SOURCES), __file__)

    @compiled
    def attend(*arguments: Any) -> Any:
        key  # noqa: B018 - makes it a closure variable
        return attend_rows(*arguments)

    return attend


def mla_decode(
    query_latent: Tensor,
    query_rope: Tensor,
    pool: Tensor,
    block_table: Tensor,
    num_tokens: Tensor,
    *,
    kv_format: KvFormat,
    scale: Tensor | None = None,
    softmax_scale: float,
    num_splits: int = 1,
    out: AttentionOutput | None = None,
) -> AttentionOutput:
    """Arguments as for `mla_decode.mla_decode`; a page's tokens are one tile, so `num_splits` changes nothing.

    `query_latent` may have less than 512 elements and `query_rope` less than 64, where the pool holds zeros behind; so
    has the output then. UsageError for a page that is not in the pool.
    """
    every = np.empty((query_latent.shape[0], 0), dtype=np.int32)
    return _attend(
        query_latent, query_rope, pool, block_table, num_tokens.numpy(), every, kv_format, scale, softmax_scale, out
    )


def sparse_mla_decode(
    query_latent: Tensor,
    query_rope: Tensor,
    pool: Tensor,
    block_table: Tensor,
    positions: Tensor,
    *,
    kv_format: KvFormat,
    scale: Tensor | None = None,
    softmax_scale: float,
    num_splits: int = 1,
    out: AttentionOutput | None = None,
) -> AttentionOutput:
    """Arguments as for `mla_decode.sparse_mla_decode`, sizes and errors as above."""
    if not positions.shape[1]:
        positions = positions.new_full((positions.shape[0], 1), -1)
    counts = np.zeros(query_latent.shape[0], dtype=np.int32)
    return _attend(
        query_latent, query_rope, pool, block_table, counts, positions.numpy(), kv_format, scale, softmax_scale, out
    )


def _attend(
    query_latent: Tensor,
    query_rope: Tensor,
    pool: Tensor,
    block_table: Tensor,
    num_tokens: Any,
    positions: Any,
    kv_format: KvFormat,
    scale: Tensor | None,
    softmax_scale: float,
    out: AttentionOutput | None,
) -> AttentionOutput:
    if out is None:
        output, array = new_rows(tuple(query_latent.shape), query_latent.dtype)
        result = AttentionOutput(output, torch.empty(query_latent.shape[:2], dtype=torch.float32))
    else:
        result, array = out, row_array(out.output)
    bad = _attend_entry()(
        row_array(query_latent), row_array(query_rope), *_pool_arrays(pool, kv_format, scale), pool.shape[0],
        block_table.numpy(), num_tokens, positions, np.float32(softmax_scale), array,
        result.log_sum_exp.numpy(),
    )  # fmt: skip
    if bad >= 0:
        raise UsageError(
            f"request {bad} needs a page that is past its block table {block_table[bad].tolist()}, or not one of the "
            f"pool's {pool.shape[0]}",
            remedy="run verify_page_tags on the table before attention reads it",
        )
    return result


def _pool_arrays(pool: Tensor, kv_format: KvFormat, scale: Tensor | None) -> tuple[Any, ...]:
    """Latents, ropes, latent scales, rope scale and places, as `attend_rows` takes them."""
    flat = flat_elements(pool)
    page, token = pool.stride(0), pool.stride(1)
    if kv_format is FP8_DS_MLA:
        halves, floats = torch.bfloat16.itemsize, torch.float32.itemsize
        places = (
            page, token, page // halves, token // halves, DS_MLA_ROPE_OFFSET_BYTES // halves,
            page // floats, token // floats, DS_MLA_SCALES_OFFSET_BYTES // floats, DS_MLA_SCALE_GROUP,
        )  # fmt: skip
        ropes, scales = flat.view(torch.bfloat16), flat.view(torch.float32)
        return flat.numpy(), row_array(ropes), scales.numpy(), _ONE[0], places
    places = (page, token, page, token, MLA_LATENT_SIZE, 0, 0, 0, MLA_LATENT_SIZE)
    elements = row_array(flat)
    factors: Any = _ONE if scale is None else scale.view(1).numpy()
    return elements, elements, factors, factors[0], places
