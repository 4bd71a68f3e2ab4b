"""GQA decode on the CPU: float32 math on dequantized tiles, a request at a time, its KV heads together."""

from __future__ import annotations

from collections.abc import Iterator

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
    num_kv_heads, head_dim = key_pool.shape[2:]

    def tiles(slots: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for first in range(0, slots.shape[0], TILE_TOKENS):
            tile = slots[first : first + TILE_TOKENS]
            keys = read_gqa_tokens(key_pool, tile, kv_format, k_scale)
            values = read_gqa_tokens(value_pool, tile, kv_format, v_scale)
            yield keys.transpose(0, 1), values.transpose(0, 1)

    for request, (pages, count) in enumerate(zip(block_table, num_tokens.tolist(), strict=True)):
        groups = query[request].to(torch.float32).view(num_kv_heads, -1, head_dim)
        output, log_sum_exp = attend_tiles(groups, tiles(slots_of_pages(pages, count)), head_dim, softmax_scale)
        result.output[request], result.log_sum_exp[request] = output.flatten(0, 1), log_sum_exp.flatten()
    return result
