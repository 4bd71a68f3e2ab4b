"""FP8 blocks and packed INT4 to BF16 or FP16 on the GPU; signatures and bytes as dequantize_reference.py."""

# Triton compiles these from the types it is called with.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from memopt.kernels import dequantize_reference, float8_reference
from memopt.kernels.checks import check_packed, check_source
from memopt.kernels.device.current_device import on_tensors_device
from memopt.kernels.device.triton_math import INTERPRETED, bf16_bits_to_f32, e4m3_bits_to_f32, to_bf16
from memopt.kernels.int4_spec import BlockShape
from memopt.kernels.layout import (
    BITS_PER_BYTE,
    CODES_PER_WORD,
    F32_MAGNITUDE_MASK,
    INT4_BITS,
    INT4_CODE_MASK,
    INT4_CODE_OFFSET,
)

# The smallest float32 magnitude, as bits, that rounds to infinity: halfway from the largest number to the next power.
OVERFLOW_BITS = {torch.bfloat16: 0x7F7F8000, torch.float16: 0x477FF000}
NUM_WARPS = 4
FLOAT8_TILE = (32, 128)
# Rows and words: 32 weights a thread, 16 bytes a load.
INT4_TILE = (16, 32)

_MAGNITUDE = tl.constexpr(F32_MAGNITUDE_MASK)
_CODES = tl.constexpr(CODES_PER_WORD)
_CODE_BITS = tl.constexpr(INT4_BITS)
_CODE_MASK = tl.constexpr(INT4_CODE_MASK)
_CODE_OFFSET = tl.constexpr(INT4_CODE_OFFSET)


@triton.jit
def _round(value, IS_BF16: tl.constexpr):
    """float32 `value` as BF16 or FP16."""
    if IS_BF16:
        return to_bf16(value)
    else:
        return value.to(tl.float16)


@triton.jit
def _flag_overflow(value, is_valid, flag, OVERFLOW: tl.constexpr):
    """`flag` becomes 1 when a float32 `value` is NaN or too large."""
    magnitude = tl.where(is_valid, value.to(tl.int32, bitcast=True) & _MAGNITUDE, 0)
    if tl.max(magnitude) >= OVERFLOW:  # bits of float32 sort as the numbers do, infinity and NaN last
        tl.store(flag, 1)


@triton.jit
def expand_float8(weight, scales, result, flag, num_rows, num_columns, num_scale_columns, SCALE_ROWS: tl.constexpr,
                  SCALE_COLUMNS: tl.constexpr, ONE_SCALE: tl.constexpr, OVERFLOW: tl.constexpr, IS_BF16: tl.constexpr,
                  ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """A tile of ROWS x COLUMNS weights. ONE_SCALE: no tile's row lies in two blocks."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    first = tl.program_id(1) * COLUMNS
    column = first + tl.arange(0, COLUMNS)[None, :]
    is_valid = (row < num_rows) & (column < num_columns)
    row_scale = row // SCALE_ROWS * num_scale_columns
    if ONE_SCALE:
        scale = tl.load(scales + row_scale + first // SCALE_COLUMNS, mask=row < num_rows, other=0.0)
    else:
        scale = tl.load(scales + row_scale + column // SCALE_COLUMNS, mask=is_valid, other=0.0)
    place = row.to(tl.int64) * num_columns + column
    bits = tl.load(weight + place, mask=is_valid, other=0)
    if INTERPRETED:
        value = e4m3_bits_to_f32(bits)
    else:
        value = bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    value = value * scale
    _flag_overflow(value, is_valid, flag, OVERFLOW)
    tl.store(result + place, _round(value, IS_BF16), mask=is_valid)


@triton.jit
def expand_int4(packed, scale_bits, result, flag, num_rows, num_words, num_groups, GROUP_WORDS: tl.constexpr,
                OVERFLOW: tl.constexpr, IS_BF16: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr):  # fmt: skip
    """A tile of ROWS x WORDS packed words. `flag` becomes 1 when code -8 under some scale would overflow."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)[None, :]
    is_valid = (row < num_rows) & (word < num_words)
    place = row.to(tl.int64) * num_words + word
    bits = tl.load(packed + place, mask=is_valid, other=0)
    group = row.to(tl.int64) * num_groups + word // GROUP_WORDS
    scale = bf16_bits_to_f32(tl.load(scale_bits + group, mask=is_valid, other=0))
    _flag_overflow(scale * _CODE_OFFSET, is_valid, flag, OVERFLOW)
    element = tl.arange(0, _CODES)[None, None, :]
    code = ((bits[:, :, None] >> (element * _CODE_BITS)) & _CODE_MASK) - _CODE_OFFSET
    rounded = _round(code.to(tl.float32) * scale[:, :, None], IS_BF16)
    tl.store(result + (place[:, :, None] * _CODES + element), rounded, mask=is_valid[:, :, None])


@on_tensors_device
def launch_float8(bits: Tensor, block_scale: Tensor, block: BlockShape, result: Tensor, flag: Tensor) -> None:
    """Expands checked, contiguous FP8 bits uint8 [R, C] into `result`; sets `flag` int32 [1] where that overflows."""
    rows, columns = bits.shape
    tile_rows, tile_columns = FLOAT8_TILE
    is_row_wide = block.columns >= columns
    expand_float8[(triton.cdiv(rows, tile_rows), triton.cdiv(columns, tile_columns))](
        bits,
        block_scale.contiguous(),
        result,
        flag,
        rows,
        columns,
        block_scale.shape[1],
        SCALE_ROWS=block.rows,
        # A block at least as wide as the row is taken as whole tiles: its scale is number 0.
        SCALE_COLUMNS=triton.cdiv(columns, tile_columns) * tile_columns if is_row_wide else block.columns,
        ONE_SCALE=is_row_wide or block.columns % tile_columns == 0,
        OVERFLOW=OVERFLOW_BITS[result.dtype],
        IS_BF16=result.dtype == torch.bfloat16,
        ROWS=tile_rows,
        COLUMNS=tile_columns,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )


@on_tensors_device
def launch_int4(packed: Tensor, scale_bits: Tensor, group: int, result: Tensor, flag: Tensor) -> None:
    """Expands checked, contiguous codes into `result`; sets `flag` int32 [1] where code -8 would overflow."""
    rows, words = packed.shape
    tile_rows, tile_words = INT4_TILE
    expand_int4[(triton.cdiv(rows, tile_rows), triton.cdiv(words, tile_words))](
        packed,
        scale_bits.view(torch.int16),
        result,
        flag,
        rows,
        words,
        scale_bits.shape[1],
        GROUP_WORDS=group // CODES_PER_WORD,
        OVERFLOW=OVERFLOW_BITS[result.dtype],
        IS_BF16=result.dtype == torch.bfloat16,
        ROWS=tile_rows,
        WORDS=tile_words,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )


def dequantize_float8(weight: Tensor, block_scale: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """As `dequantize_reference.dequantize_float8`, on the device that holds the weight. Waits for the device once."""
    bits = weight.contiguous().view(torch.uint8)
    shape = check_source(tuple(bits.shape), bits.element_size() * BITS_PER_BYTE, tuple(block_scale.shape), block)
    result = torch.empty(bits.shape, dtype=dtype, device=bits.device)
    flag = torch.zeros(1, dtype=torch.int32, device=bits.device)
    launch_float8(bits, block_scale, shape, result, flag)
    if int(flag):
        error = float8_reference.first_non_finite(result, bits, block_scale, block)
        raise error or RuntimeError("the kernel reported a weight that is not finite, but every weight is")
    return result


def dequantize_int4(packed: Tensor, scale_bits: Tensor, group_size: int | None, dtype: torch.dtype) -> Tensor:
    """As `dequantize_reference.dequantize_int4`, on the device that holds the codes. Waits for the device once."""
    group = check_packed(tuple(packed.shape), tuple(scale_bits.shape), group_size)
    result = torch.empty(packed.shape[0], packed.shape[1] * CODES_PER_WORD, dtype=dtype, device=packed.device)
    flag = torch.zeros(1, dtype=torch.int32, device=packed.device)
    launch_int4(packed.contiguous(), scale_bits.contiguous(), group, result, flag)
    if int(flag) and not bool(torch.isfinite(result).all()):
        raise dequantize_reference.non_finite_int4(result, scale_bits, group)
    return result
