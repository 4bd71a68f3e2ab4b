"""Reads tokens back from KV pages on the CPU with numba, values as the reference.

Eager FP8 casts are 10 to 20 times slower. Slots are taken as checked; padding reads as zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.kv_cache.kv_format import ds_mla_views, float_indexer_keys, is_float_indexer_pool
from memopt.kernels.kv_cache.kv_offsets import ds_mla_offsets, flat_bytes, indexer_offsets, row_offsets
from memopt.kernels.kv_cache.kv_rows_entry import load_grouped_entry, load_scaled_entry
from memopt.kernels.kv_cache.kv_slots import places
from memopt.kernels.kv_formats import FP8_DS_MLA, KvFormat
from memopt.kernels.layout import DS_MLA_NUM_SCALES, DS_MLA_SCALE_GROUP, INDEXER_KEY_SIZE, MLA_KEY_SIZE, MLA_LATENT_SIZE


def read_mla_tokens(pool: Tensor, slots: Tensor, kv_format: KvFormat, scale: Tensor | None = None) -> Tensor:
    """float32 [T, 576] of tokens in an MLA pool; arguments as for `kv_load.read_mla_tokens`."""
    if kv_format is FP8_DS_MLA:
        tokens = torch.empty(slots.shape[0], MLA_KEY_SIZE)
        flat, offsets = flat_bytes(pool), ds_mla_offsets(pool, slots)
        load_grouped_entry()(
            flat.numpy(), flat.view(torch.float32).numpy(), offsets.codes, offsets.scales,
            DS_MLA_SCALE_GROUP, DS_MLA_NUM_SCALES, tokens.numpy(),
        )  # fmt: skip
        tokens[:, MLA_LATENT_SIZE:] = _plain_rows(ds_mla_views(pool).rope, slots)
        return tokens
    return _plain_rows(pool, slots) if scale is None else _scaled_rows(pool, slots, scale.view(1))


def read_gqa_tokens(pool: Tensor, slots: Tensor, kv_format: KvFormat, scale: Tensor | None = None) -> Tensor:
    """float32 [T, kv_heads, head_dim] of tokens in a pool of K or V; arguments as for `kv_load.read_gqa_tokens`."""
    return _plain_rows(pool, slots) if scale is None else _scaled_rows(pool, slots, scale)


def read_indexer_keys(pool: Tensor, slots: Tensor) -> Tensor:
    """float32 [T, 128] of keys in an indexer pool; arguments as for `kv_load.read_indexer_keys`."""
    if is_float_indexer_pool(pool):
        return _plain_rows(float_indexer_keys(pool), slots)
    keys, flat, offsets = torch.empty(slots.shape[0], INDEXER_KEY_SIZE), flat_bytes(pool), indexer_offsets(pool, slots)
    load_grouped_entry()(
        flat.numpy(), flat.view(torch.float32).numpy(), offsets.codes, offsets.scales,
        INDEXER_KEY_SIZE, 1, keys.numpy(),
    )  # fmt: skip
    return keys


def _plain_rows(rows: Tensor, slots: Tensor) -> Tensor:
    """`rows`: the tokens' rows in a pool, bfloat16 or float32 [P, 64, ...]."""
    at = slots.clamp(min=0)
    # index_select copies whole rows at once, but of evenly spaced ones only.
    found = rows.flatten(0, 1).index_select(0, at) if rows.is_contiguous() else rows[places(at)]
    tokens = found.to(torch.float32)
    tokens[slots < 0] = 0.0
    return tokens


def _scaled_rows(pool: Tensor, slots: Tensor, scales: Tensor) -> Tensor:
    tokens = torch.empty(slots.shape[0], *pool.shape[2:])
    flat = tokens.view(slots.shape[0], pool[0, 0].numel())
    load_scaled_entry()(flat_bytes(pool).numpy(), row_offsets(pool, slots), scales.numpy(), flat.numpy())
    return tokens
