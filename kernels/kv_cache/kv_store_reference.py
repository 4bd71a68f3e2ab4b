"""Stores of new tokens into KV pages: plain torch, written to be read. It defines the bytes of every format."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.kv_cache.kv_format import ds_mla_views, float_indexer_keys, indexer_views, is_float_indexer_pool
from memopt.kernels.kv_cache.kv_slots import places
from memopt.kernels.kv_formats import FP8_DS_MLA, KvFormat
from memopt.kernels.layout import (
    DS_MLA_MIN_SCALE,
    DS_MLA_SCALE_GROUP,
    E4M3_MAX,
    E4M3_NAN_MAGNITUDE,
    F32_BELOW_NEXT_POWER,
    F32_INFINITY_BITS,
    INDEXER_KEY_SIZE,
    INDEXER_MIN_SCALE,
    MLA_LATENT_SIZE,
    PAGE_TOKENS,
)


def e4m3_codes(values: Tensor) -> Tensor:
    """e4m3fn codes uint8 of float32 values, any shape: nearest, ties to even, saturating at 448; any NaN is 0x7F.

    NaN loses its sign, because arithmetic on a GPU does not keep it.
    """
    codes = values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill(torch.isnan(values), E4M3_NAN_MAGNITUDE)


def bf16_values(values: Tensor) -> Tensor:
    """bfloat16 of values, any shape: BF16 bit for bit, float32 to nearest, ties to even, any NaN as 0x7FC0."""
    if values.dtype == torch.bfloat16:
        return values
    return values.to(torch.bfloat16).masked_fill(torch.isnan(values), torch.nan)


def plain_values(values: Tensor, dtype: torch.dtype) -> Tensor:
    """What a pool without scales of `dtype` stores of values: `bf16_values`, or float32 as it is."""
    return values.to(torch.float32) if dtype == torch.float32 else bf16_values(values)


def group_scales(values: Tensor, group: int, min_scale: float, *, power_of_two: bool) -> Tensor:
    """float32 scales [T, C / group] of float32 values [T, C]: amax / 448, rounded up to a power of two if asked.

    NaN takes no part in amax. Never below `min_scale`.
    """
    magnitudes = values.abs().masked_fill(torch.isnan(values), 0.0)
    largest = _groups(magnitudes, group).amax(dim=2)
    # A tensor, not a number: CUDA divides by a number through its reciprocal, which rounds differently.
    scales = largest / torch.full_like(largest, E4M3_MAX)
    if power_of_two:
        bits = (scales.view(torch.int32) + F32_BELOW_NEXT_POWER) & F32_INFINITY_BITS
        scales = bits.view(torch.float32)
    return scales.clamp(min=min_scale)


def scale_codes(values: Tensor, scales: Tensor, group: int) -> Tensor:
    """e4m3fn codes uint8 [T, C] of float32 values [T, C] divided by their group's scale, float32 [T, C / group]."""
    return e4m3_codes((_groups(values, group) / scales[:, :, None]).flatten(1))


def mla_store(
    latent: Tensor,
    rope: Tensor,
    pool: Tensor,
    slots: Tensor,
    kv_format: KvFormat,
    scale: Tensor | None = None,
    bad_slot: Tensor | None = None,
) -> None:
    """Writes the latents and ropes of new tokens into an MLA pool; arguments as for `kv_store.mla_store`."""
    tokens, pages, positions = _written(slots, pool.shape[0], bad_slot)
    latent, rope = latent[tokens], rope[tokens]
    if kv_format is FP8_DS_MLA:
        views, values = ds_mla_views(pool), latent.to(torch.float32)
        scales = group_scales(values, DS_MLA_SCALE_GROUP, DS_MLA_MIN_SCALE, power_of_two=False)
        views.latent[pages, positions] = scale_codes(values, scales, DS_MLA_SCALE_GROUP)
        views.scales[pages, positions] = scales
        views.rope[pages, positions] = bf16_values(rope)
        return
    for values, columns in ((latent, slice(0, MLA_LATENT_SIZE)), (rope, slice(MLA_LATENT_SIZE, None))):
        pool[pages, positions, columns] = _stored(values, pool, scale)


def gqa_store(
    key: Tensor,
    value: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    slots: Tensor,
    kv_format: KvFormat,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    bad_slot: Tensor | None = None,
) -> None:
    """Writes the keys and values of new tokens into their pools; arguments as for `kv_store.gqa_store`."""
    tokens, pages, positions = _written(slots, key_pool.shape[0], bad_slot)
    for values, pool, scale in ((key, key_pool, k_scale), (value, value_pool, v_scale)):
        pool[pages, positions] = _stored(values[tokens], pool, None if scale is None else scale[:, None])


def indexer_store(key: Tensor, pool: Tensor, slots: Tensor, bad_slot: Tensor | None = None) -> None:
    """Writes the indexer keys of new tokens into their pool; arguments as for `kv_store.indexer_store`."""
    tokens, pages, positions = _written(slots, pool.shape[0], bad_slot)
    values = key[tokens].to(torch.float32)
    if is_float_indexer_pool(pool):
        float_indexer_keys(pool)[pages, positions] = values
        return
    views = indexer_views(pool)
    scales = group_scales(values, INDEXER_KEY_SIZE, INDEXER_MIN_SCALE, power_of_two=True)
    views.keys[pages, positions] = scale_codes(values, scales, INDEXER_KEY_SIZE)
    views.scales[pages, positions] = scales[:, 0]


def _groups(values: Tensor, group: int) -> Tensor:
    return values.reshape(values.shape[0], values.shape[1] // group, group)


def _stored(values: Tensor, pool: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        return plain_values(values, pool.dtype)
    return e4m3_codes(values.to(torch.float32) / scale)


def _written(slots: Tensor, num_pages: int, bad_slot: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Indices of the tokens to write, with their pages and positions; sets `bad_slot` when a slot is past the pool."""
    past = slots >= num_pages * PAGE_TOKENS
    if bad_slot is not None:
        bad_slot |= past.any()
    tokens = ((slots >= 0) & ~past).nonzero()[:, 0]
    return tokens, *places(slots[tokens])
