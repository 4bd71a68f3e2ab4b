"""Writes new tokens into KV pages by slot: checks, then the kernel of the device that holds the pool.

slot = page * 64 + position in the page. A negative slot is padding and is skipped. A slot past the pool is refused on
the CPU; on a GPU it is not written and sets `bad_slot`, which the host reads with the step's results. Two tokens with
one slot are refused on the CPU; a GPU does not look, and which of the two stays is not defined.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.errors import ShapeError
from memopt.kernels.device.tensor_checks import require_tensor
from memopt.kernels.kv_cache import kv_store_cpu
from memopt.kernels.kv_cache.kv_format import (
    require_gqa_pool,
    require_gqa_scale,
    require_indexer_pool,
    require_mla_pool,
    require_mla_scale,
)
from memopt.kernels.kv_cache.kv_slots import check_slots
from memopt.kernels.kv_formats import KvFormat
from memopt.kernels.layout import INDEXER_KEY_SIZE, MLA_LATENT_SIZE, MLA_ROPE_SIZE


def mla_store(
    latent: Tensor,
    rope: Tensor,
    pool: Tensor,
    slots: Tensor,
    kv_format: KvFormat,
    scale: Tensor | None = None,
    bad_slot: Tensor | None = None,
    *,
    is_checked: bool = False,
) -> None:
    """Writes the latents and ropes of T new tokens into an MLA pool.

    `latent` [T, 512] and `rope` [T, 64]: bfloat16 or float32, rows may be strided. `pool`: kv_format.py. `slots` int64
    [T]. `scale`: float32 scalar of the layer for fp8_e4m3 (stored = value / scale), else None; fp8_ds_mla makes its own
    scales, amax / 448 over 128 latent elements. `bad_slot` int32 [1], set to 1 when a slot is past the pool, else left
    alone: needed on a GPU. `is_checked`: the caller has run `check_slots` for the step and vouches for the rest, so
    that a layer does not do it again. Raises ShapeError or AlignmentError for tensors that do not fit, UsageError for
    slots. Source: vLLM csrc/cache_kernels.cu (concat_and_cache_mla, concat_and_cache_ds_mla_kernel).
    """
    num_tokens = latent.shape[0] if latent.ndim else 0
    if not is_checked:
        require_mla_pool(pool, kv_format)
        _require_rows("latent", latent, (None, MLA_LATENT_SIZE), pool)
        _require_rows("rope", rope, (num_tokens, MLA_ROPE_SIZE), pool, latent.dtype)
        require_mla_scale(scale, kv_format, like=pool)
        _require_slots(slots, num_tokens, pool, bad_slot)
    if num_tokens == 0:
        return
    if pool.is_cuda:
        from memopt.kernels.kv_cache import kv_store_triton

        kv_store_triton.mla_store(latent, rope, pool, slots, kv_format, scale, bad_slot)
    else:
        kv_store_cpu.mla_store(latent, rope, pool, slots, kv_format, scale, bad_slot)


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
    """Writes the keys and values of T new tokens into their pools.

    `key`, `value` [T, kv_heads, head_dim]: bfloat16 or float32, tokens may be strided. `key_pool`, `value_pool`
    [P, 64, kv_heads, head_dim] of the format. `k_scale`, `v_scale`: float32 [kv_heads] for fp8_e4m3, else None.
    `slots`, `bad_slot` and errors as for `mla_store`.
    """
    require_tensor("key", key, (None, None, None), torch.bfloat16, torch.float32, contiguous=False)
    num_tokens, num_kv_heads, head_dim = key.shape
    require_gqa_pool("the K pool", key_pool, kv_format, num_kv_heads, head_dim)
    require_gqa_pool("the V pool", value_pool, kv_format, num_kv_heads, head_dim, like=key_pool)
    if key_pool.shape != value_pool.shape:
        raise ShapeError(f"the K pool is {list(key_pool.shape)}, but the V pool is {list(value_pool.shape)}")
    _require_rows("key", key, (None, None, None), key_pool)
    _require_rows("value", value, (num_tokens, num_kv_heads, head_dim), key_pool, key.dtype)
    require_gqa_scale("k_scale", k_scale, kv_format, num_kv_heads, like=key_pool)
    require_gqa_scale("v_scale", v_scale, kv_format, num_kv_heads, like=key_pool)
    _require_slots(slots, num_tokens, key_pool, bad_slot)
    if num_tokens == 0:
        return
    if key_pool.is_cuda:
        from memopt.kernels.kv_cache import kv_store_triton

        kv_store_triton.gqa_store(key, value, key_pool, value_pool, slots, kv_format, k_scale, v_scale, bad_slot)
    else:
        kv_store_cpu.gqa_store(key, value, key_pool, value_pool, slots, kv_format, k_scale, v_scale, bad_slot)


def indexer_store(
    key: Tensor, pool: Tensor, slots: Tensor, bad_slot: Tensor | None = None, *, is_checked: bool = False
) -> None:
    """Writes the indexer keys of T new tokens into their pool: e4m3 with amax / 448 rounded up to a power of two.

    `key` [T, 128]: bfloat16 or float32, rows may be strided. `pool` uint8 [P, 64 * 132]. `slots`, `bad_slot`,
    `is_checked` and errors as for `mla_store`. Source: vLLM csrc/cache_kernels.cu (indexer_k_quant_and_cache_kernel,
    use_ue8m0).
    """
    if not is_checked:
        require_indexer_pool(pool)
        _require_rows("key", key, (None, INDEXER_KEY_SIZE), pool)
        _require_slots(slots, key.shape[0], pool, bad_slot)
    if key.shape[0] == 0:
        return
    if pool.is_cuda:
        from memopt.kernels.kv_cache import kv_store_triton

        kv_store_triton.indexer_store(key, pool, slots, bad_slot)
    else:
        kv_store_cpu.indexer_store(key, pool, slots, bad_slot)


def _require_rows(
    name: str, rows: Tensor, shape: tuple[int | None, ...], pool: Tensor, dtype: torch.dtype | None = None
) -> None:
    """ShapeError unless `rows` fits and each token's row is contiguous; `dtype`: of the tensor that comes with it."""
    dtypes = (dtype,) if dtype is not None else (torch.bfloat16, torch.float32)
    require_tensor(name, rows, shape, *dtypes, like=pool, contiguous=False)
    if rows.shape[0] and not rows[0].is_contiguous():
        raise ShapeError(
            f"{name} {list(rows.shape)} has strides {list(rows.stride())}, but each token's row must be contiguous",
            remedy="call .contiguous() first",
        )


def _require_slots(slots: Tensor, num_tokens: int, pool: Tensor, bad_slot: Tensor | None) -> None:
    require_tensor("slots", slots, (num_tokens,), torch.int64, like=pool)
    if bad_slot is not None:
        require_tensor("bad_slot", bad_slot, (1,), torch.int32, like=pool)
    elif pool.is_cuda:
        raise ShapeError("on a GPU bad_slot, int32 [1], is needed", remedy="pass zeros and read them after the step")
    if not pool.is_cuda:
        check_slots(slots, pool.shape[0])
