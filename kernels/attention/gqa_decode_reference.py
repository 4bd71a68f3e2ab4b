"""GQA decode: plain torch, written to be read. It defines the result."""

from __future__ import annotations

from torch import Tensor

from memopt.kernels.attention.attention_output import AttentionOutput, new_output
from memopt.kernels.attention.softmax_reference import attend, compute_dtype
from memopt.kernels.kv_cache.kv_load import read_gqa_tokens
from memopt.kernels.kv_cache.kv_slots import slots_of_pages
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
    """Arguments as for `gqa_decode.gqa_decode`; queries may be float64 as well. `num_splits` changes nothing here."""
    result = new_output(query, query.shape[2]) if out is None else out
    dtype = compute_dtype(query)
    num_kv_heads = key_pool.shape[2]
    group = query.shape[1] // num_kv_heads
    for request, (pages, count) in enumerate(zip(block_table, num_tokens.tolist(), strict=True)):
        slots = slots_of_pages(pages, count)
        keys = read_gqa_tokens(key_pool, slots, kv_format, k_scale).to(dtype)
        values = read_gqa_tokens(value_pool, slots, kv_format, v_scale).to(dtype)
        for kv_head in range(num_kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            output, log_sum_exp = attend(
                query[request, heads].to(dtype), keys[:, kv_head], values[:, kv_head], softmax_scale
            )
            result.output[request, heads], result.log_sum_exp[request, heads] = output, log_sum_exp
    return result
