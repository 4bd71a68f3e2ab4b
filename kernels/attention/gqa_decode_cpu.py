"""GQA decode on the CPU: float32 math on dequantized tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.attention.attention_output import AttentionOutput, new_output
from memopt.kernels.attention.row_slots_cpu import dense_row_slots
from memopt.kernels.attention.softmax_cpu import attend_rows
from memopt.kernels.kv_cache.kv_load import read_gqa_tokens
from memopt.kernels.kv_formats import KvFormat


def gqa_decode(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    block_table: Tensor,
    num_tokens: Tensor,
    *,
    kv_format: KvFormat,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    softmax_scale: float,
    num_splits: int = 1,
    out: AttentionOutput | None = None,
) -> AttentionOutput:
    """Arguments as for `gqa_decode.gqa_decode`; tiles are fixed, so `num_splits` changes nothing."""

    def read_slots(slots: Tensor) -> tuple[Tensor, Tensor]:
        keys = read_gqa_tokens(key_pool, slots, kv_format, k_scale)
        return keys, read_gqa_tokens(value_pool, slots, kv_format, v_scale)

    num_requests, num_heads, head_dim = query.shape
    result = new_output(query, head_dim) if out is None else out
    groups = query.to(torch.float32).view(num_requests, key_pool.shape[2], -1, head_dim)
    rows = dense_row_slots(block_table, num_tokens)
    output, log_sum_exp = attend_rows(groups, rows, read_slots, head_dim, softmax_scale)
    result.output.copy_(output.view(num_requests, num_heads, head_dim))
    result.log_sum_exp.copy_(log_sum_exp.view(num_requests, num_heads))
    return result
