"""MLA decode, dense and over selected tokens: plain torch, written to be read. It defines the result."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.attention.attention_output import AttentionOutput, new_output
from memopt.kernels.attention.selected_slots import selected_slots
from memopt.kernels.attention.softmax_reference import attend, compute_dtype
from memopt.kernels.kv_cache.kv_load import read_mla_tokens
from memopt.kernels.kv_cache.kv_slots import slots_of_pages
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
    slots = [slots_of_pages(pages, int(count)) for pages, count in zip(block_table, num_tokens, strict=True)]
    return _over_slots(query_latent, query_rope, pool, slots, kv_format, scale, softmax_scale, out)


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
    slots = [selected_slots(pages, row) for pages, row in zip(block_table, positions, strict=True)]
    return _over_slots(query_latent, query_rope, pool, slots, kv_format, scale, softmax_scale, out)


def _over_slots(
    query_latent: Tensor,
    query_rope: Tensor,
    pool: Tensor,
    slots: list[Tensor],
    kv_format: KvFormat,
    scale: Tensor | None,
    softmax_scale: float,
    out: AttentionOutput | None,
) -> AttentionOutput:
    result = new_output(query_latent, MLA_LATENT_SIZE) if out is None else out
    query = torch.cat((query_latent, query_rope), dim=2).to(compute_dtype(query_latent))
    for request, places in enumerate(slots):
        keys = read_mla_tokens(pool, places, kv_format, scale).to(query.dtype)
        output, log_sum_exp = attend(query[request], keys, keys[:, :MLA_LATENT_SIZE], softmax_scale)
        result.output[request], result.log_sum_exp[request] = output, log_sum_exp
    return result
