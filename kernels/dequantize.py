"""FP8 blocks and packed INT4 to BF16 or FP16 tensors: checks, then Triton on the GPU, numba or torch on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memopt.errors import ShapeError, UnsupportedError
from memopt.kernels import cpu
from memopt.kernels.checks import check_packed, check_source
from memopt.kernels.layout import (
    BITS_PER_BYTE,
    CODES_PER_WORD,
    E4M3_EXPONENT_BIAS,
    E4M3_MAGNITUDE_MASK,
    E4M3_MANTISSA_BITS,
    E4M3_NAN_MAGNITUDE,
    EACH_NIBBLE,
    F16_INFINITY_BITS,
    F16_MAGNITUDE_MASK,
    F32_BITS,
    F32_EXPONENT_BIAS,
    F32_MANTISSA_BITS,
    F32_SIGN_MASK,
    INT4_BITS,
    INT4_CODE_MIN,
    INT4_CODE_OFFSET,
    WORD_BITS,
)

if TYPE_CHECKING:
    import torch

# Weights expanded at once on the CPU where torch does it: their float32 values stay in a core's cache.
CPU_STEP_WEIGHTS = 1 << 17
_SHIFT = F32_MANTISSA_BITS - E4M3_MANTISSA_BITS
# Sign-extended and shifted, an e4m3 byte is a float32 with this much too small an exponent.
_FIELDS = F32_SIGN_MASK | (E4M3_MAGNITUDE_MASK << _SHIFT)
_RESCALE = 2.0 ** (F32_EXPONENT_BIAS - E4M3_EXPONENT_BIAS)
_SIGN_NIBBLES = EACH_NIBBLE * INT4_CODE_OFFSET - (1 << WORD_BITS)


def dequantize_float8(
    weight: torch.Tensor, block_scale: torch.Tensor, block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Weights [R, C] of `dtype` (bfloat16 or float16): float32(e4m3) * float32(scale), rounded once more, half to even.

    `weight` uint8 or float8_e4m3fn [R, C]; `block_scale` float32 [ceil(R / rows), ceil(C / columns)] of `block` (rows,
    columns), on the same device. Raises ShapeError or UsageError for input that does not fit, UnsupportedError for
    another dtype, NonFiniteWeightError for the first result that is NaN or infinite.
    """
    import torch

    _check_dtype(dtype)
    if weight.dtype not in (torch.uint8, torch.float8_e4m3fn):
        raise ShapeError(f"weight {list(weight.shape)} is {weight.dtype}, but uint8 or float8_e4m3fn is needed")
    if block_scale.dtype != torch.float32:
        raise ShapeError(f"block_scale {list(block_scale.shape)} is {block_scale.dtype}, but float32 is needed")
    _check_device(weight, block_scale)
    check_source(tuple(weight.shape), weight.element_size() * BITS_PER_BYTE, tuple(block_scale.shape), block)
    if weight.is_cuda:
        from memopt.kernels import dequantize_triton

        return dequantize_triton.dequantize_float8(weight, block_scale, block, dtype)
    bits = weight.contiguous().view(torch.uint8)
    if dtype == torch.bfloat16:
        result = cpu.dequantize_float8_bf16(bits.numpy(), block_scale.numpy(), block)
        return torch.from_numpy(result.view("int16")).view(torch.bfloat16)
    return _float8_by_torch(bits, block_scale, block, dtype)


def dequantize_int4(
    packed: torch.Tensor, scale_bits: torch.Tensor, group_size: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """Weights [R, C] of `dtype` (bfloat16 or float16): code * scale, rounded once, half to even.

    `packed` int32 [R, C / 8]; `scale_bits` int16 (or bfloat16) [R, G], on the same device; `group_size` weights a
    scale, None: the row. Raises ShapeError when they do not fit, UnsupportedError for another dtype, NonFiniteError
    when a weight is NaN or too large for `dtype`.
    """
    import torch

    from memopt.kernels import dequantize_reference

    _check_dtype(dtype)
    if packed.dtype != torch.int32 or scale_bits.dtype not in (torch.int16, torch.bfloat16):
        raise ShapeError(
            f"packed is {packed.dtype} and scale_bits {scale_bits.dtype}, but int32 and int16 (or bfloat16) are needed"
        )
    _check_device(packed, scale_bits)
    group = check_packed(tuple(packed.shape), tuple(scale_bits.shape), group_size)
    if packed.is_cuda:
        from memopt.kernels import dequantize_triton

        return dequantize_triton.dequantize_int4(packed, scale_bits, group_size, dtype)
    if dtype == torch.bfloat16:
        scales = scale_bits.contiguous().view(torch.int16).numpy().view("uint16")
        result = torch.from_numpy(cpu.dequantize_int4(packed.numpy(), scales, group).view("int16")).view(dtype)
    else:
        result = _int4_by_torch(packed, scale_bits, group, dtype)
    # Code -8 is the largest: only where it would not be finite is every weight looked at.
    extremes = (scale_bits.view(torch.bfloat16).to(torch.float32) * INT4_CODE_MIN).to(dtype)
    if not bool(torch.isfinite(extremes).all()) and not bool(torch.isfinite(result).all()):
        raise dequantize_reference.non_finite_int4(result, scale_bits, group)
    return result


def _float8_by_torch(
    bits: torch.Tensor, block_scale: torch.Tensor, block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """The fields of every byte are shifted to those of a float32: torch's own cast of FP8 is a loop over bytes."""
    import torch

    from memopt.kernels.float8_reference import first_non_finite

    rows, columns = bits.shape
    result = torch.empty(rows, columns, dtype=dtype)
    fields = torch.tensor(_FIELDS - (1 << F32_BITS), dtype=torch.int32)
    whole = columns // block[1] * block[1]
    largest = 0
    for first, count in _steps(rows, columns):
        codes = bits[first : first + count]
        shifted = codes.view(torch.int8).to(torch.int32)
        values = shifted.bitwise_left_shift_(_SHIFT).bitwise_and_(fields).view(torch.float32).mul_(_RESCALE)
        magnitudes = codes & E4M3_MAGNITUDE_MASK
        if int(magnitudes.max()) == E4M3_NAN_MAGNITUDE:
            values.masked_fill_(magnitudes == E4M3_NAN_MAGNITUDE, torch.nan)
        scale = block_scale[torch.arange(first, first + count) // block[0]]
        values[:, :whole].view(count, -1, block[1]).mul_(scale[:, : whole // block[1], None])
        values[:, whole:].mul_(scale[:, whole // block[1] :])
        rounded = result[first : first + count].copy_(values)
        largest = max(largest, int((rounded.view(torch.int16) & F16_MAGNITUDE_MASK).max()))
    if largest >= F16_INFINITY_BITS:
        raise first_non_finite(result, bits, block_scale, block) or RuntimeError("an infinite weight was not found")
    return result


def _int4_by_torch(packed: torch.Tensor, scale_bits: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
    """Nibble by nibble of all words; nothing here is checked."""
    import torch

    rows, words = packed.shape
    result = torch.empty(rows, words * CODES_PER_WORD, dtype=dtype)
    scale = scale_bits.view(torch.bfloat16).to(torch.float32)
    for first, count in _steps(rows, words * CODES_PER_WORD):
        codes = torch.empty(count, words, CODES_PER_WORD)
        for j in range(CODES_PER_WORD):
            # An arithmetic shift from the top sign-extends; the offset of 8 flips the code's sign bit.
            signed = (packed[first : first + count] ^ _SIGN_NIBBLES) << (WORD_BITS - INT4_BITS * (j + 1))
            codes[:, :, j] = signed >> (WORD_BITS - INT4_BITS)
        values = codes.view(count, -1, group).mul_(scale[first : first + count, :, None])
        result[first : first + count] = values.flatten(1)
    return result


def _steps(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """First row and number of rows of each step over a matrix that has weights."""
    step = max(CPU_STEP_WEIGHTS // max(columns, 1), 1)
    for first in range(0, rows if columns else 0, step):
        yield first, min(step, rows - first)


def _check_dtype(dtype: torch.dtype) -> None:
    import torch

    if dtype not in (torch.bfloat16, torch.float16):
        raise UnsupportedError(
            f"weights cannot be dequantized to {dtype}", remedy="use torch.bfloat16 or torch.float16"
        )


def _check_device(weight: torch.Tensor, scale: torch.Tensor) -> None:
    if weight.device != scale.device:
        raise ShapeError(f"the weight is on {weight.device}, its scales are on {scale.device}")
