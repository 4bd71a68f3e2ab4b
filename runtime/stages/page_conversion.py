"""Reads pages of one engine's BF16 pools into another's pages, in the format of those."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memopt.errors import HandOverError
from memopt.kernels.kv_cache.kv_convert import convert_gqa_tokens, convert_mla_tokens
from memopt.kernels.kv_cache.kv_format import indexer_views
from memopt.kernels.kv_cache.kv_slots import slots_of_pages
from memopt.kernels.layout import PAGE_TOKENS
from memopt.runtime.kv.layer_kv import KvPools, LayerKv, MlaLayerKv


def convert_layer(source: LayerKv, source_pages: Tensor, target: LayerKv, pages: Tensor, num_tokens: int) -> None:
    """Copies `num_tokens` tokens of one layer, rounding them as the target's format does.

    `source`: BF16 pools; `source_pages`, `pages` int64 [N]: the sequence's pages in either, N = ceil(num_tokens / 64).
    Indexer keys are copied as they are, e4m3 and scale. What lies behind the last token is not read, and is 0 in the
    target's indexer page. Raises HandOverError for layers of different kinds, ShapeError as kv_convert does.
    """
    source_slots, slots = (slots_of_pages(some, num_tokens) for some in (source_pages, pages))
    if isinstance(source, MlaLayerKv) and isinstance(target, MlaLayerKv):
        convert_mla_tokens(
            source.pool, source_slots, target.pool, slots, target.kv_format, target.scale, target.bad_slot
        )
        if (source.indexer_pool is None) != (target.indexer_pool is None):
            raise HandOverError("one of the two layers has an indexer, the other none")
        if source.indexer_pool is not None and target.indexer_pool is not None:
            target.indexer_pool[pages] = indexer_pages(source.indexer_pool, source_pages, num_tokens)
    elif not isinstance(source, MlaLayerKv) and not isinstance(target, MlaLayerKv):
        convert_gqa_tokens(
            source.key_pool, source.value_pool, source_slots, target.key_pool, target.value_pool, slots,
            target.kv_format, target.k_scale, target.v_scale, target.bad_slot,
        )  # fmt: skip
    else:
        raise HandOverError("one of the two layers has latents, the other keys and values of heads")


def indexer_pages(pool: Tensor, pages: Tensor, num_tokens: int) -> Tensor:
    """A copy uint8 [N, 64 * 132] of indexer pages that hold `num_tokens` tokens, zeros behind the last."""
    copied = pool[pages]
    views, end = indexer_views(copied), num_tokens - (pages.shape[0] - 1) * PAGE_TOKENS
    views.keys[-1, end:] = 0
    views.scales[-1, end:] = 0
    return copied


def value_pages(pool: Tensor, pages: Tensor, num_tokens: int) -> Tensor:
    """A copy [N, 64, ...] of pages of a BF16 pool that hold `num_tokens` tokens, zeros behind the last."""
    copied = pool[pages]
    copied[-1, num_tokens - (pages.shape[0] - 1) * PAGE_TOKENS :] = 0
    return copied


def convert_pools(
    source: KvPools, source_pages: Sequence[int], target: KvPools, pages: Sequence[int], num_tokens: int
) -> None:
    """`convert_layer` for every layer; both sets of pools are on one device."""
    device = device_of(target)
    source_numbers, numbers = (torch.tensor(some, dtype=torch.int64, device=device) for some in (source_pages, pages))
    for source_layer, layer in zip(source.layers, target.layers, strict=True):
        convert_layer(source_layer, source_numbers, layer, numbers, num_tokens)


def device_of(pools: KvPools) -> torch.device:
    """The device that holds the pools."""
    layer = pools.layers[0]
    return (layer.pool if isinstance(layer, MlaLayerKv) else layer.key_pool).device
