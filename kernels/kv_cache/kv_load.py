"""Reads tokens back from KV pages: checks, then the path of the device that holds the pool.

For references, for the CPU path of attention, and for looking at a cache. Attention on a GPU reads pages itself; here a
GPU runs the reference.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from memopt.errors import UsageError
from memopt.kernels.device.tensor_checks import require_tensor
from memopt.kernels.kv_cache import kv_load_cpu, kv_load_reference
from memopt.kernels.kv_cache.kv_format import (
    require_gqa_pool,
    require_gqa_scale,
    require_indexer_pool,
    require_mla_pool,
    require_mla_scale,
)
from memopt.kernels.kv_formats import KvFormat
from memopt.kernels.layout import (
    E4M3_EXPONENT_BIAS,
    E4M3_MANTISSA_BITS,
    E4M3_NAN_MAGNITUDE,
    F32_EXPONENT_BIAS,
    F32_MANTISSA_BITS,
    F32_SIGN_MASK,
    PAGE_TOKENS,
)

_TO_F32 = F32_MANTISSA_BITS - E4M3_MANTISSA_BITS
# A sign-extended code, shifted: the sign stays at the top, the copies of it in between are cut.
_F32_FIELDS = (E4M3_NAN_MAGNITUDE << _TO_F32) - F32_SIGN_MASK
_REBIAS = 2.0 ** (F32_EXPONENT_BIAS - E4M3_EXPONENT_BIAS)


def e4m3_values(codes: Tensor) -> Tensor:
    """float32 values of e4m3fn codes uint8, any shape, any device, exact; the NaN codes give NaN.

    The fields are shifted into those of a float32, whose exponent is then 120 too small, subnormals included.
    """
    values = (codes.view(torch.int8).to(torch.int32) << _TO_F32).bitwise_and_(_F32_FIELDS).view(torch.float32)
    return values.mul_(_REBIAS).masked_fill_((codes & E4M3_NAN_MAGNITUDE) == E4M3_NAN_MAGNITUDE, torch.nan)


def read_mla_tokens(pool: Tensor, slots: Tensor, kv_format: KvFormat, scale: Tensor | None = None) -> Tensor:
    """float32 [T, 576] of tokens in an MLA pool: latent, then rope; code * scale is rounded once.

    `pool`: kv_format.py. `slots` int64 [T], any order, repeats allowed; padding (negative) reads as zeros.
    `scale`: float32 scalar of the layer for fp8_e4m3, else None. Raises ShapeError or AlignmentError for tensors that
    do not fit, UsageError on the CPU for a slot past the pool.
    """
    require_mla_pool(pool, kv_format)
    require_mla_scale(scale, kv_format, like=pool)
    path = _path(pool, slots)
    return path.read_mla_tokens(pool, slots, kv_format, scale)


def read_gqa_tokens(pool: Tensor, slots: Tensor, kv_format: KvFormat, scale: Tensor | None = None) -> Tensor:
    """float32 [T, kv_heads, head_dim] of tokens in a pool of K, or of V.

    `scale`: float32 [kv_heads], the layer's k_scale or v_scale, for fp8_e4m3, else None. Slots and errors as for
    `read_mla_tokens`.
    """
    require_tensor("the pool", pool, (None, PAGE_TOKENS, None, None), contiguous=False)
    num_kv_heads, head_dim = pool.shape[2:]
    require_gqa_pool("the pool", pool, kv_format, num_kv_heads, head_dim)
    require_gqa_scale("scale", scale, kv_format, num_kv_heads, like=pool)
    path = _path(pool, slots)
    return path.read_gqa_tokens(pool, slots, kv_format, scale)


def read_indexer_keys(pool: Tensor, slots: Tensor) -> Tensor:
    """float32 [T, 128] of keys in an indexer pool. Slots and errors as for `read_mla_tokens`."""
    require_indexer_pool(pool)
    path = _path(pool, slots)
    return path.read_indexer_keys(pool, slots)


def _path(pool: Tensor, slots: Tensor) -> ModuleType:
    """The module that reads this pool, once its slots are checked."""
    require_tensor("slots", slots, (None,), torch.int64, like=pool)
    if pool.is_cuda:
        return kv_load_reference
    num_slots = pool.shape[0] * PAGE_TOKENS
    if bool((slots >= num_slots).any()):
        raise UsageError(
            f"slot {int(slots.max())} is past the pool: {pool.shape[0]} pages have {num_slots} slots",
            remedy="check the block table against the pool's number of pages",
        )
    return kv_load_cpu
