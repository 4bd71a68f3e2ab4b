"""GQA decode on the CPU: float32 math on dequantized tiles, a request and a KV head at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.attention.attention_output import AttentionOutput, new_output
from memopt.kernels.attention.softmax_cpu import TILE_TOKENS, attend_tiles
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
    """Arguments as for `gqa_decode.gqa_decode`; tiles are fixed, so `num_splits` changes nothing."""
    result = new_output(query, query.shape[2]) if out is None else out
    num_kv_heads = key_pool.shape[2]
    group = query.shape[1] // num_kv_heads
    for request, (pages, count) in enumerate(zip(block_table, num_tokens.tolist(), strict=True)):
        slots = slots_of_pages(pages, count)
        # Read once for all heads, and head by head from then on.
        keys = read_gqa_tokens(key_pool, slots, kv_format, k_scale).transpose(0, 1).contiguous()
        values = read_gqa_tokens(value_pool, slots, kv_format, v_scale).transpose(0, 1).contiguous()
        for kv_head in range(num_kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            tiles = [
                (keys[kv_head, first : first + TILE_TOKENS], values[kv_head, first : first + TILE_TOKENS])
                for first in range(0, count, TILE_TOKENS)
            ]
            output, log_sum_exp = attend_tiles(
                query[request, heads].to(torch.float32), tiles, query.shape[2], softmax_scale
            )
            result.output[request, heads], result.log_sum_exp[request, heads] = output, log_sum_exp
    return result
