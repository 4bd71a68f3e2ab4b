"""MLA decode on the CPU, dense and over selected tokens: float32 math on dequantized tiles, a request at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from memopt.kernels.attention.attention_output import AttentionOutput
from memopt.kernels.attention.mla_requests import AttendRequest, attend_requests, dense_slots, selected_slots
from memopt.kernels.attention.softmax_cpu import TILE_TOKENS, attend_tiles
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
    slots = dense_slots(block_table, num_tokens)
    attend = _attention(pool, kv_format, scale, softmax_scale)
    return attend_requests(query_latent, query_rope, slots, attend, torch.float32, out)


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
    slots = selected_slots(block_table, positions)
    attend = _attention(pool, kv_format, scale, softmax_scale)
    return attend_requests(query_latent, query_rope, slots, attend, torch.float32, out)


def _attention(pool: Tensor, kv_format: KvFormat, scale: Tensor | None, softmax_scale: float) -> AttendRequest:
    def attend(query: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        return attend_tiles(query, _tiles(pool, slots, kv_format, scale), MLA_LATENT_SIZE, softmax_scale)

    return attend


def _tiles(pool: Tensor, slots: Tensor, kv_format: KvFormat, scale: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    for first in range(0, slots.shape[0], TILE_TOKENS):
        keys = read_mla_tokens(pool, slots[first : first + TILE_TOKENS], kv_format, scale)
        yield keys, keys[:, :MLA_LATENT_SIZE]
