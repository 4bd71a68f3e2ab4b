"""MLA decode on the CPU, dense and over selected tokens: float32 math on dequantized tiles, a request at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from memopt.kernels.attention.attention_output import AttentionOutput, new_output
from memopt.kernels.attention.selected_slots import selected_slots
from memopt.kernels.attention.softmax_cpu import TILE_TOKENS, attend_tiles
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
    """Arguments as for `mla_decode.mla_decode`; tiles are fixed, so `num_splits` changes nothing."""
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
    """Arguments as for `mla_decode.sparse_mla_decode`."""
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
    for request, places in enumerate(slots):
        query = torch.cat((query_latent[request], query_rope[request]), dim=1).to(torch.float32)
        tiles = _tiles(pool, places, kv_format, scale)
        output, log_sum_exp = attend_tiles(query, tiles, MLA_LATENT_SIZE, softmax_scale)
        result.output[request], result.log_sum_exp[request] = output, log_sum_exp
    return result


def _tiles(pool: Tensor, slots: Tensor, kv_format: KvFormat, scale: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    for first in range(0, slots.shape[0], TILE_TOKENS):
        keys = read_mla_tokens(pool, slots[first : first + TILE_TOKENS], kv_format, scale)
        yield keys, keys[:, :MLA_LATENT_SIZE]
