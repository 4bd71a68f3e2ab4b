"""MLA decode on the CPU, dense and over selected tokens: float32 math on dequantized tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.attention.attention_output import AttentionOutput, new_output
from memopt.kernels.attention.row_slots_cpu import dense_row_slots, selected_row_slots
from memopt.kernels.attention.softmax_cpu import RowSlots, attend_rows
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
    """Arguments as for `mla_decode.mla_decode`; tiles are fixed, so `num_splits` changes nothing."""
    rows = dense_row_slots(block_table, num_tokens)
    return _attend(query_latent, query_rope, rows, pool, kv_format, scale, softmax_scale, out)


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
    """Arguments as for `mla_decode.sparse_mla_decode`."""
    rows = selected_row_slots(block_table, positions)
    return _attend(query_latent, query_rope, rows, pool, kv_format, scale, softmax_scale, out)


def _attend(
    query_latent: Tensor,
    query_rope: Tensor,
    rows: RowSlots,
    pool: Tensor,
    kv_format: KvFormat,
    scale: Tensor | None,
    softmax_scale: float,
    out: AttentionOutput | None,
) -> AttentionOutput:
    def read_slots(slots: Tensor) -> tuple[Tensor, Tensor]:
        keys = read_mla_tokens(pool, slots, kv_format, scale)[:, None]
        return keys, keys[..., :MLA_LATENT_SIZE]

    result = new_output(query_latent, MLA_LATENT_SIZE) if out is None else out
    query = torch.cat((query_latent, query_rope), dim=2)[:, None].to(torch.float32)
    output, log_sum_exp = attend_rows(query, rows, read_slots, MLA_LATENT_SIZE, softmax_scale)
    result.output.copy_(output[:, 0])
    result.log_sum_exp.copy_(log_sum_exp[:, 0])
    return result
