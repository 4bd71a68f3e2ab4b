"""MLA decode, dense and over selected tokens: plain torch, written to be read. It defines the result."""

from __future__ import annotations

from torch import Tensor

from memopt.kernels.attention.attention_output import AttentionOutput
from memopt.kernels.attention.mla_requests import AttendRequest, attend_requests, dense_slots, selected_slots
from memopt.kernels.attention.softmax_reference import attend, compute_dtype
from memopt.kernels.kv_cache.kv_load import read_mla_tokens
from memopt.kernels.kv_formats import KvFormat
from memopt.kernels.layout import MLA_LATENT_SIZE


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
    """Arguments as for `mla_decode.mla_decode`; queries may be float64 as well. `num_splits` changes nothing here."""
    slots = dense_slots(block_table, num_tokens)
    over_rows = _attention(pool, kv_format, scale, softmax_scale)
    return attend_requests(query_latent, query_rope, slots, over_rows, compute_dtype(query_latent), out)


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
    """Arguments as for `mla_decode.sparse_mla_decode`; queries may be float64 as well."""
    slots = selected_slots(block_table, positions)
    over_rows = _attention(pool, kv_format, scale, softmax_scale)
    return attend_requests(query_latent, query_rope, slots, over_rows, compute_dtype(query_latent), out)


def _attention(pool: Tensor, kv_format: KvFormat, scale: Tensor | None, softmax_scale: float) -> AttendRequest:
    def over_rows(query: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        keys = read_mla_tokens(pool, slots, kv_format, scale).to(query.dtype)
        return attend(query, keys, keys[:, :MLA_LATENT_SIZE], softmax_scale)

    return over_rows
