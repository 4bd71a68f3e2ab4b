"""Stores of new tokens into KV pages in Triton: several tokens a program, bytes as the reference."""

# Triton compiles these from the types it is called with.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from memopt.kernels.device.capability import has_capability
from memopt.kernels.device.current_device import on_tensors_device
from memopt.kernels.device.triton_math import round_e4m3_bits, to_bf16
from memopt.kernels.kv_formats import FP8_DS_MLA, KvFormat
from memopt.kernels.layout import (
    BF16_SHIFT,
    DS_MLA_MIN_SCALE,
    DS_MLA_NUM_SCALES,
    DS_MLA_ROPE_OFFSET_BYTES,
    DS_MLA_SCALE_GROUP,
    DS_MLA_SCALES_OFFSET_BYTES,
    DS_MLA_TOKEN_BYTES,
    E4M3_MAX,
    E4M3_NAN_MAGNITUDE,
    F32_BELOW_NEXT_POWER,
    F32_INFINITY_BITS,
    F32_MAGNITUDE_MASK,
    F32_QUIET_NAN_BITS,
    INDEXER_KEY_SIZE,
    INDEXER_MIN_SCALE,
    INDEXER_PAGE_SCALES_OFFSET_BYTES,
    MLA_KEY_SIZE,
    MLA_LATENT_SIZE,
    MLA_ROPE_SIZE,
    PADDING_SLOT,
    PAGE_TOKENS,
)

_PAGE_TOKENS, _PADDING = tl.constexpr(PAGE_TOKENS), tl.constexpr(PADDING_SLOT)
_LATENT, _ROPE, _KEY = tl.constexpr(MLA_LATENT_SIZE), tl.constexpr(MLA_ROPE_SIZE), tl.constexpr(MLA_KEY_SIZE)
_DS_BYTES, _DS_GROUP = tl.constexpr(DS_MLA_TOKEN_BYTES), tl.constexpr(DS_MLA_SCALE_GROUP)
_DS_SCALES, _DS_MIN_SCALE = tl.constexpr(DS_MLA_NUM_SCALES), tl.constexpr(DS_MLA_MIN_SCALE)
_DS_SCALES_AT = tl.constexpr(DS_MLA_SCALES_OFFSET_BYTES // torch.float32.itemsize)
_HALF_BYTES, _SCALE_BYTES = tl.constexpr(torch.bfloat16.itemsize), tl.constexpr(torch.float32.itemsize)
_DS_ROPE_AT = tl.constexpr(DS_MLA_ROPE_OFFSET_BYTES // torch.bfloat16.itemsize)
_INDEXER_KEY, _INDEXER_MIN_SCALE = tl.constexpr(INDEXER_KEY_SIZE), tl.constexpr(INDEXER_MIN_SCALE)
_INDEXER_SCALES_AT = tl.constexpr(INDEXER_PAGE_SCALES_OFFSET_BYTES // torch.float32.itemsize)
_E4M3_MAX, _E4M3_NAN = tl.constexpr(E4M3_MAX), tl.constexpr(E4M3_NAN_MAGNITUDE)
_F32_MAGNITUDE, _F32_INFINITY = tl.constexpr(F32_MAGNITUDE_MASK), tl.constexpr(F32_INFINITY_BITS)
_BELOW_NEXT_POWER, _BF16_NAN = tl.constexpr(F32_BELOW_NEXT_POWER), tl.constexpr(F32_QUIET_NAN_BITS >> BF16_SHIFT)

# Change from step to step: one compiled variant serves them all.
_SIZES = ["num_tokens", "num_pages"]

MLA_BLOCK_TOKENS = 4
HEAD_BLOCK_TOKENS = 16
NUM_WARPS = 4
# The first compute capability with an instruction for float32 -> e4m3.
E4M3_CAPABILITY = (8, 9)


@triton.jit
def _e4m3_codes(x, CONVERT: tl.constexpr):
    """e4m3fn codes of float32 `x`. Any NaN is 0x7F: arithmetic on a GPU does not keep its sign.

    CONVERT: by cvt.rn.satfinite.e4m3x2.f32, which rounds to nearest even and takes what is past 448, infinities
    included, to 448 (PTX ISA, "cvt"): the same as `round_e4m3_bits` for every number.
    """
    if CONVERT:
        codes = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        codes = round_e4m3_bits(x)
    return tl.where(x != x, _E4M3_NAN, codes).to(tl.uint8)


@triton.jit
def _bf16_values(x):
    """BF16 of `x`: BF16 bit for bit; float32 to nearest even, any NaN as 0x7FC0."""
    if x.dtype == tl.bfloat16:
        return x
    else:
        bits = to_bf16(x).to(tl.uint16, bitcast=True)
        return tl.where(x != x, _BF16_NAN, bits).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _group_scale(groups, MIN_SCALE: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """amax / 448 along the last axis of float32 `groups`, NaN left out; rounded up to a power of two if asked."""
    bits = groups.to(tl.int32, bitcast=True) & _F32_MAGNITUDE
    bits = tl.where(bits > _F32_INFINITY, 0, bits)
    scale = tl.div_rn(tl.max(bits, axis=len(groups.shape) - 1).to(tl.float32, bitcast=True), _E4M3_MAX)
    if POWER_OF_TWO:
        scale = ((scale.to(tl.int32, bitcast=True) + _BELOW_NEXT_POWER) & _F32_INFINITY).to(tl.float32, bitcast=True)
    return tl.maximum(scale, MIN_SCALE)


@triton.jit
def _locate(slots, tokens, num_tokens, num_pages, bad_slot):
    """Page and position (int64) of the tokens, and which of them are written; sets `bad_slot` for one past the pool."""
    slot = tl.load(slots + tokens, mask=tokens < num_tokens, other=_PADDING)
    page = slot // _PAGE_TOKENS
    past = page >= num_pages
    tl.store(bad_slot, 1, mask=tl.max(past.to(tl.int32), axis=0) > 0)
    return page, slot % _PAGE_TOKENS, (slot >= 0) & (page < num_pages)


@triton.jit
def _store_columns(
    source, target, is_written, scale, SIZE: tl.constexpr, QUANTIZED: tl.constexpr, CONVERT: tl.constexpr
):
    """SIZE elements of each token, from pointers [T] to pointers [T], divided by `scale` and as e4m3 if QUANTIZED."""
    columns = tl.arange(0, triton.next_power_of_2(SIZE))
    mask = is_written[:, None] & (columns < SIZE)[None, :]
    x = tl.load(source[:, None] + columns[None, :], mask=mask, other=0.0)
    if QUANTIZED:
        codes = _e4m3_codes(tl.div_rn(x.to(tl.float32), scale), CONVERT)
        tl.store(target[:, None] + columns[None, :], codes, mask=mask)
    else:
        tl.store(target[:, None] + columns[None, :], _bf16_values(x), mask=mask)


@triton.jit(do_not_specialize=_SIZES)
def mla_store_kernel(
    latent, rope, pool, slots, scale, bad_slot, num_tokens, num_pages, latent_stride, rope_stride, page_stride,
    BLOCK_TOKENS: tl.constexpr, QUANTIZED: tl.constexpr, CONVERT: tl.constexpr,
):  # fmt: skip
    """Formats bf16 and fp8_e4m3: rows of 576 elements. Strides in elements."""
    tokens = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    page, position, is_written = _locate(slots, tokens, num_tokens, num_pages, bad_slot)
    target = pool + (page * page_stride + position * _KEY)
    token = tokens.to(tl.int64)
    factor = tl.load(scale) if QUANTIZED else 1.0
    _store_columns(latent + token * latent_stride, target, is_written, factor, _LATENT, QUANTIZED, CONVERT)
    _store_columns(rope + token * rope_stride, target + _LATENT, is_written, factor, _ROPE, QUANTIZED, CONVERT)


@triton.jit(do_not_specialize=_SIZES)
def ds_mla_store_kernel(
    latent, rope, pool, pool_scales, pool_rope, slots, bad_slot, num_tokens, num_pages, latent_stride, rope_stride,
    page_stride, BLOCK_TOKENS: tl.constexpr, CONVERT: tl.constexpr,
):  # fmt: skip
    """Format fp8_ds_mla. `pool`, `pool_scales`, `pool_rope`: one pool as bytes, float32, BF16; page stride in bytes."""
    tokens = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    page, position, is_written = _locate(slots, tokens, num_tokens, num_pages, bad_slot)
    row = page * page_stride + position * _DS_BYTES
    token = tokens.to(tl.int64)
    mask = is_written[:, None]
    columns = tl.arange(0, _LATENT)
    x = tl.load(latent + (token * latent_stride)[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    groups = tl.reshape(x, [BLOCK_TOKENS, _DS_SCALES, _DS_GROUP])
    scales = _group_scale(groups, _DS_MIN_SCALE, False)
    codes = _e4m3_codes(tl.div_rn(groups, scales[:, :, None]), CONVERT)
    tl.store(pool + row[:, None] + columns[None, :], tl.reshape(codes, [BLOCK_TOKENS, _LATENT]), mask=mask)
    places = (row // _SCALE_BYTES)[:, None] + _DS_SCALES_AT + tl.arange(0, _DS_SCALES)[None, :]
    tl.store(pool_scales + places, scales, mask=mask)
    target = pool_rope + (row // _HALF_BYTES + _DS_ROPE_AT)
    _store_columns(rope + token * rope_stride, target, is_written, 1.0, _ROPE, False, CONVERT)


@triton.jit(do_not_specialize=_SIZES)
def gqa_store_kernel(
    key, value, key_pool, value_pool, slots, k_scale, v_scale, bad_slot, num_tokens, num_pages, key_stride,
    value_stride, key_page_stride, value_page_stride, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, QUANTIZED: tl.constexpr, CONVERT: tl.constexpr,
):  # fmt: skip
    """Formats bf16 and fp8_e4m3 of heads: one program for some tokens of one head, K and V. Strides in elements."""
    tokens = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    head = tl.program_id(1)
    page, position, is_written = _locate(slots, tokens, num_tokens, num_pages, bad_slot)
    row = position * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM
    token = tokens.to(tl.int64)
    k_factor = tl.load(k_scale + head) if QUANTIZED else 1.0
    v_factor = tl.load(v_scale + head) if QUANTIZED else 1.0
    source, target = key + (token * key_stride + head * HEAD_DIM), key_pool + (page * key_page_stride + row)
    _store_columns(source, target, is_written, k_factor, HEAD_DIM, QUANTIZED, CONVERT)
    source, target = value + (token * value_stride + head * HEAD_DIM), value_pool + (page * value_page_stride + row)
    _store_columns(source, target, is_written, v_factor, HEAD_DIM, QUANTIZED, CONVERT)


@triton.jit(do_not_specialize=_SIZES)
def indexer_store_kernel(
    key, pool, pool_scales, slots, bad_slot, num_tokens, num_pages, key_stride, page_stride,
    BLOCK_TOKENS: tl.constexpr, CONVERT: tl.constexpr,
):  # fmt: skip
    """Indexer keys. `pool`, `pool_scales`: one pool as bytes and float32; page stride in bytes."""
    tokens = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    page, position, is_written = _locate(slots, tokens, num_tokens, num_pages, bad_slot)
    token = tokens.to(tl.int64)
    mask = is_written[:, None]
    columns = tl.arange(0, _INDEXER_KEY)
    x = tl.load(key + (token * key_stride)[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = _group_scale(x, _INDEXER_MIN_SCALE, True)
    codes = _e4m3_codes(tl.div_rn(x, scale[:, None]), CONVERT)
    start = page * page_stride
    tl.store(pool + (start + position * _INDEXER_KEY)[:, None] + columns[None, :], codes, mask=mask)
    tl.store(pool_scales + (start // _SCALE_BYTES + _INDEXER_SCALES_AT + position), scale, mask=is_written)


@on_tensors_device
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
    grid = (triton.cdiv(latent.shape[0], MLA_BLOCK_TOKENS),)
    sizes = (latent.shape[0], pool.shape[0], latent.stride(0), rope.stride(0), pool.stride(0))
    if kv_format is FP8_DS_MLA:
        ds_mla_store_kernel[grid](
            latent, rope, pool, pool.view(torch.float32), pool.view(torch.bfloat16), slots, bad_slot, *sizes,
            BLOCK_TOKENS=MLA_BLOCK_TOKENS, CONVERT=_converts(pool), num_warps=NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    else:
        mla_store_kernel[grid](
            latent, rope, pool, slots, scale, bad_slot, *sizes, BLOCK_TOKENS=MLA_BLOCK_TOKENS,
            QUANTIZED=scale is not None, CONVERT=_converts(pool), num_warps=NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip


@on_tensors_device
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
    num_tokens, num_kv_heads, head_dim = key.shape
    gqa_store_kernel[(triton.cdiv(num_tokens, HEAD_BLOCK_TOKENS), num_kv_heads)](
        key, value, key_pool, value_pool, slots, k_scale, v_scale, bad_slot, num_tokens, key_pool.shape[0],
        key.stride(0), value.stride(0), key_pool.stride(0), value_pool.stride(0), NUM_HEADS=num_kv_heads,
        HEAD_DIM=head_dim, BLOCK_TOKENS=HEAD_BLOCK_TOKENS, QUANTIZED=kv_format.has_layer_scale,
        CONVERT=_converts(key_pool), num_warps=NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


@on_tensors_device
def indexer_store(key: Tensor, pool: Tensor, slots: Tensor, bad_slot: Tensor | None = None) -> None:
    """Writes the indexer keys of new tokens into their pool; arguments as for `kv_store.indexer_store`."""
    indexer_store_kernel[(triton.cdiv(key.shape[0], HEAD_BLOCK_TOKENS),)](
        key, pool, pool.view(torch.float32), slots, bad_slot, key.shape[0], pool.shape[0], key.stride(0),
        pool.stride(0), BLOCK_TOKENS=HEAD_BLOCK_TOKENS, CONVERT=_converts(pool), num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip


def _converts(pool: Tensor) -> bool:
    """Whether the device has an instruction for float32 -> e4m3; AMD's gives other bytes past 448."""
    return has_capability(pool.device, E4M3_CAPABILITY)
