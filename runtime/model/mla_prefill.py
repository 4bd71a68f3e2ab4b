"""MLA of prompt rows: keys and values of all heads expanded from the latents in the pages, a chunk at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.attention.prefill_attention import prefill_attention
from memopt.kernels.gemm.row_tiles import tiled_matmul
from memopt.kernels.kv_cache.kv_load import read_mla_tokens
from memopt.kernels.kv_cache.kv_slots import slots_of_pages
from memopt.kernels.layout import MLA_LATENT_SIZE
from memopt.runtime.kv.layer_kv import MlaLayerKv
from memopt.runtime.model.model_config import MlaConfig
from memopt.runtime.model.selection import Selection
from memopt.runtime.model.step_rows import PrefillChunk, StepRows


def attend_prompt_rows(
    query: Tensor,
    key_up: Tensor,
    value_up: Tensor,
    rows: StepRows,
    kv: MlaLayerKv,
    selection: Selection | None,
    config: MlaConfig,
) -> Tensor:
    """Output [P, heads, value size] of the P prompt rows' queries [P, heads, nope + rope], in the query's type.

    `key_up` [heads, nope, latent] and `value_up` [heads, value, latent] in the query's type. Every chunk reads its
    request's tokens from the pages, its own included, which are stored already.
    """
    return torch.cat(
        [
            _attend_chunk(query, key_up, value_up, config, chunk, rows.block_table[chunk.first_row], kv, selection)
            for chunk in rows.chunks
        ]
    )


def _attend_chunk(
    query: Tensor,
    key_up: Tensor,
    value_up: Tensor,
    config: MlaConfig,
    chunk: PrefillChunk,
    pages: Tensor,
    kv: MlaLayerKv,
    selection: Selection | None,
) -> Tensor:
    places = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
    slots = slots_of_pages(pages, chunk.first_position + chunk.num_rows)
    num_heads = query.shape[1]

    def read_tile(first: int, after: int) -> tuple[Tensor, Tensor]:
        tokens = read_mla_tokens(kv.pool, slots[first:after], kv.kv_format, kv.scale).to(query.dtype)
        latents = tokens[:, : config.latent_size].contiguous()
        nope, values = (
            tiled_matmul(latents, up.flatten(0, 1)).view(-1, num_heads, up.shape[1]) for up in (key_up, value_up)
        )
        rope = tokens[:, None, MLA_LATENT_SIZE : MLA_LATENT_SIZE + config.rope_size].expand(-1, num_heads, -1)
        return torch.cat((nope, rope), dim=2), values

    return prefill_attention(
        query[places].contiguous(), read_tile, chunk.first_position, num_kv_heads=num_heads,
        value_size=config.value_size, softmax_scale=config.softmax_scale,
        selected=None if selection is None else selection.positions[places],
    )  # fmt: skip
