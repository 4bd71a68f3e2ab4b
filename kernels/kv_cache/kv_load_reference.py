"""Reads tokens back from KV pages as float32: plain torch, written to be read."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.kv_cache.kv_format import ds_mla_views, float_indexer_keys, indexer_views, is_float_indexer_pool
from memopt.kernels.kv_cache.kv_slots import places
from memopt.kernels.kv_formats import FP8_DS_MLA, KvFormat
from memopt.kernels.layout import DS_MLA_SCALE_GROUP


def read_mla_tokens(pool: Tensor, slots: Tensor, kv_format: KvFormat, scale: Tensor | None = None) -> Tensor:
    """float32 [T, 576] of tokens in an MLA pool; arguments as for `kv_load.read_mla_tokens`."""
    at = places(slots.clamp(min=0))
    if kv_format is FP8_DS_MLA:
        views = ds_mla_views(pool)
        latent = _value(views.latent[at]) * views.scales[at].repeat_interleave(DS_MLA_SCALE_GROUP, dim=1)
        tokens = torch.cat((latent, views.rope[at].to(torch.float32)), dim=1)
    else:
        tokens = _value(pool[at]) if scale is None else _value(pool[at]) * scale
    return tokens.masked_fill((slots < 0)[:, None], 0.0)


def read_gqa_tokens(pool: Tensor, slots: Tensor, kv_format: KvFormat, scale: Tensor | None = None) -> Tensor:
    """float32 [T, kv_heads, head_dim] of tokens in a pool of K or V; arguments as for `kv_load.read_gqa_tokens`."""
    values = _value(pool[places(slots.clamp(min=0))])
    tokens = values if scale is None else values * scale[:, None]
    return tokens.masked_fill((slots < 0)[:, None, None], 0.0)


def read_indexer_keys(pool: Tensor, slots: Tensor) -> Tensor:
    """float32 [T, 128] of keys in an indexer pool; arguments as for `kv_load.read_indexer_keys`."""
    at = places(slots.clamp(min=0))
    if is_float_indexer_pool(pool):
        keys = float_indexer_keys(pool)[at]
    else:
        views = indexer_views(pool)
        keys = _value(views.keys[at]) * views.scales[at][:, None]
    return keys.masked_fill((slots < 0)[:, None], 0.0)


def _value(stored: Tensor) -> Tensor:
    return stored.view(torch.float8_e4m3fn if stored.dtype == torch.uint8 else stored.dtype).to(torch.float32)
