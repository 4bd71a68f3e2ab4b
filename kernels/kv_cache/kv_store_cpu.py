"""Stores of new tokens into KV pages on the CPU: numba for the e4m3 formats, else torch; bytes as the reference.

Slots are taken as checked (kv_slots.check_slots).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from memopt.errors import UsageError
from memopt.kernels.kv_cache.kv_format import float_indexer_keys, is_float_indexer_pool
from memopt.kernels.kv_cache.kv_offsets import GroupOffsets, ds_mla_offsets, flat_bytes, indexer_offsets, row_offsets
from memopt.kernels.kv_cache.kv_rows_entry import store_grouped_entry, store_plain_entry, store_scaled_entry
from memopt.kernels.kv_formats import FP8_DS_MLA, KvFormat
from memopt.kernels.layout import (
    DS_MLA_MIN_SCALE,
    DS_MLA_ROPE_OFFSET_BYTES,
    DS_MLA_SCALE_GROUP,
    INDEXER_KEY_SIZE,
    INDEXER_MIN_SCALE,
    MLA_KEY_SIZE,
    MLA_LATENT_SIZE,
    PAGE_TOKENS,
)
from memopt.kernels.rows.row_arrays import row_array


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
    if kv_format is FP8_DS_MLA:
        places_in_pool = ds_mla_offsets(pool, slots)
        _store_grouped(latent, DS_MLA_SCALE_GROUP, DS_MLA_MIN_SCALE, places_in_pool, pool, power_of_two=False)
        halves = pool.view(torch.bfloat16)[..., DS_MLA_ROPE_OFFSET_BYTES // torch.bfloat16.itemsize :]
        _store_plain(rope, halves, slots)
    elif scale is None:
        if _are_side_by_side(latent, rope):
            _store_plain(latent.as_strided((latent.shape[0], MLA_KEY_SIZE), latent.stride()), pool, slots)
        else:
            _store_plain(latent, pool[..., :MLA_LATENT_SIZE], slots)
            _store_plain(rope, pool[..., MLA_LATENT_SIZE:], slots)
    else:
        offsets = row_offsets(pool, slots)
        _store_scaled(latent, scale.view(1), offsets, pool)
        _store_scaled(rope, scale.view(1), np.where(offsets < 0, offsets, offsets + MLA_LATENT_SIZE), pool)


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
    for values, pool, scale in ((key, key_pool, k_scale), (value, value_pool, v_scale)):
        if scale is None:
            _store_plain(values, pool, slots)
        else:
            _store_scaled(values.flatten(1), scale, row_offsets(pool, slots), pool)


def indexer_store(key: Tensor, pool: Tensor, slots: Tensor, bad_slot: Tensor | None = None) -> None:
    """Writes the indexer keys of new tokens into their pool; arguments as for `kv_store.indexer_store`."""
    if is_float_indexer_pool(pool):
        _store_plain(key, float_indexer_keys(pool), slots)
        return
    offsets = indexer_offsets(pool, slots)
    _store_grouped(key, INDEXER_KEY_SIZE, INDEXER_MIN_SCALE, offsets, pool, power_of_two=True)


def _are_side_by_side(latent: Tensor, rope: Tensor) -> bool:
    """Whether they are two parts of one tensor's rows, as rows/layer_rows.py makes them: then one store does it."""
    distance_bytes = rope.data_ptr() - latent.data_ptr()
    return distance_bytes == MLA_LATENT_SIZE * latent.itemsize and latent.stride() == rope.stride() == (MLA_KEY_SIZE, 1)


def _store_plain(values: Tensor, rows: Tensor, slots: Tensor) -> None:
    """`rows`: the tokens' rows in a pool, bfloat16 or float32 [P, 64, ...], each token's contiguous."""
    page_stride, token_stride = rows.stride()[:2]
    # One line from the first element to the last; a view of less than a token's row ends before the page does.
    num_elements = (rows.shape[0] - 1) * page_stride + (PAGE_TOKENS - 1) * token_stride + rows[0, 0].numel()
    bad = store_plain_entry()(
        row_array(values.flatten(1)), slots.numpy(), rows.shape[0] * PAGE_TOKENS, page_stride, token_stride,
        row_array(rows.as_strided((num_elements,), (1,))),
    )  # fmt: skip
    if bad >= 0:
        raise UsageError(
            f"slot {int(slots[bad])} of token {bad} is past the pool: {rows.shape[0]} pages have "
            f"{rows.shape[0] * PAGE_TOKENS} slots",
            remedy="check the block table against the pool's number of pages",
        )


def _store_scaled(values: Tensor, scales: Tensor, offsets: Any, pool: Tensor) -> None:
    store_scaled_entry()(_float32(values), scales.numpy(), offsets, flat_bytes(pool).numpy())


def _store_grouped(
    values: Tensor,
    group: int,
    min_scale: float,
    offsets: GroupOffsets,
    pool: Tensor,
    *,
    power_of_two: bool,
) -> None:
    flat = flat_bytes(pool)
    store_grouped_entry()(
        _float32(values), group, power_of_two, np.float32(min_scale), offsets.codes,
        offsets.scales, flat.numpy(), flat.view(torch.float32).numpy(),
    )  # fmt: skip


def _float32(values: Tensor) -> Any:
    return values.to(torch.float32).contiguous().numpy()
