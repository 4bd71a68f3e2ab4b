"""GQA of prompt rows: a chunk at a time over the keys and values in the pages."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.attention.prefill_attention import prefill_attention
from memopt.kernels.kv_cache.kv_load import read_gqa_tokens
from memopt.kernels.kv_cache.kv_slots import slots_of_pages
from memopt.runtime.kv.layer_kv import GqaLayerKv
from memopt.runtime.model.step_rows import PrefillChunk, StepRows


def attend_prompt_rows(query: Tensor, softmax_scale: float, rows: StepRows, kv: GqaLayerKv) -> Tensor:
    """Output [P, heads, D] of the P prompt rows' queries [P, heads, D], in the query's type; D is that of the pools.

    Every chunk reads its request's tokens from the pages, its own included, which are stored already.
    """
    return torch.cat(
        [_attend_chunk(query, softmax_scale, chunk, rows.block_table[chunk.first_row], kv) for chunk in rows.chunks]
    )


def _attend_chunk(query: Tensor, softmax_scale: float, chunk: PrefillChunk, pages: Tensor, kv: GqaLayerKv) -> Tensor:
    slots = slots_of_pages(pages, chunk.first_position + chunk.num_rows)
    num_kv_heads, head_dim = kv.key_pool.shape[2:]

    def read_tile(first: int, after: int) -> tuple[Tensor, Tensor]:
        keys = read_gqa_tokens(kv.key_pool, slots[first:after], kv.kv_format, kv.k_scale)
        values = read_gqa_tokens(kv.value_pool, slots[first:after], kv.kv_format, kv.v_scale)
        return keys, values

    return prefill_attention(
        query[chunk.first_row : chunk.first_row + chunk.num_rows].contiguous(), read_tile, chunk.first_position,
        num_kv_heads=num_kv_heads, value_size=head_dim, softmax_scale=softmax_scale,
    )  # fmt: skip
