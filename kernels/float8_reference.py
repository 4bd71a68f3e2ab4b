"""FP8 e4m3fn blocks to float32 and BF16, and UE8M0 block scales: plain torch, written to be read."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.errors import ShapeError
from memopt.kernels.checks import NonFiniteWeightError, check_source
from memopt.kernels.layout import BF16_BITS, BITS_PER_BYTE, F32_MANTISSA_BITS, UE8M0_MIN_VALUE, UE8M0_NAN
from memopt.kernels.number_reference import bf16_bits


def decode_ue8m0(codes: Tensor) -> Tensor:
    """float32 scales of exponent bytes uint8, any shape: 2 ** (byte - 127), and 255 is NaN.

    The byte is the exponent field of a float32, except that 0 is 2**-127, a subnormal. Raises ShapeError for another
    dtype. Source: OCP Microscaling Formats v1.0, section 5.4.1.
    """
    if codes.dtype != torch.uint8:
        raise ShapeError(f"UE8M0 scales are {codes.dtype}, but uint8 is needed", remedy="view the bytes as uint8")
    values = (codes.to(torch.int32) << F32_MANTISSA_BITS).view(torch.float32)
    values = values.masked_fill(codes == UE8M0_NAN, torch.nan)
    return values.masked_fill(codes == 0, UE8M0_MIN_VALUE)


def stored_bits(weight: Tensor) -> Tensor:
    """The bits of a chunk as int32, any shape: of uint8 or float8_e4m3fn, or of uint16, int16 or bfloat16.

    Raises ShapeError for another dtype.
    """
    if weight.dtype in (torch.uint8, torch.float8_e4m3fn):
        return weight.view(torch.uint8).to(torch.int32)
    if weight.dtype in (torch.uint16, torch.int16, torch.bfloat16):
        return weight.view(torch.int16).to(torch.int32) & ((1 << BF16_BITS) - 1)
    raise ShapeError(
        f"a weight is {weight.dtype}, but FP8 (uint8, float8_e4m3fn) or BF16 (uint16, int16, bfloat16) is needed"
    )


def weight_values(weight: Tensor, block_scale: Tensor | None, block: tuple[int, int] | None) -> Tensor:
    """float32 weights [R, C] of a chunk, NaN and infinities kept: float32(e4m3) * float32(scale), rounded once.

    Arguments and errors as for `dequantize_float8`.
    """
    scale_shape = None if block_scale is None else tuple(block_scale.shape)
    item_bits = weight.element_size() * BITS_PER_BYTE
    bits = stored_bits(weight)
    rows, columns = check_source(tuple(weight.shape), item_bits, scale_shape, block)
    if block_scale is None:
        return bits.to(torch.int16).view(torch.bfloat16).to(torch.float32)
    if block_scale.dtype != torch.float32:
        raise ShapeError(f"a block scale is {block_scale.dtype}, but float32 is needed", remedy="convert it first")
    values = bits.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    scale = block_scale.repeat_interleave(rows, dim=0)[: values.shape[0]]
    return values * scale.repeat_interleave(columns, dim=1)[:, : values.shape[1]]


def first_non_finite(
    values: Tensor, weight: Tensor, block_scale: Tensor | None, block: tuple[int, int] | None
) -> NonFiniteWeightError | None:
    """The error for the first value [R, C] (row-major) that is NaN or infinite, or None when all are finite."""
    bad = ~torch.isfinite(values)
    if not bool(bad.any()):
        return None
    row, column = divmod(int(bad.reshape(-1).to(torch.uint8).argmax()), values.shape[1])
    bits = int(stored_bits(weight[row, column].reshape(1)))
    scale = None
    if block_scale is not None and block is not None:
        scale = float(block_scale[row // block[0], column // block[1]])
    return NonFiniteWeightError(row, column, bits, scale)


def dequantize_float8(weight: Tensor, block_scale: Tensor, block: tuple[int, int]) -> Tensor:
    """float32 weights [R, C] of FP8 rows: float32(e4m3) * float32(scale), rounded once.

    `weight`: uint8 or float8_e4m3fn [R, C]. `block_scale`: float32 [ceil(R / rows), ceil(C / columns)] of `block`
    (rows, columns); the last block of either direction may be ragged.
    Raises ShapeError or UsageError for input that does not fit, NonFiniteWeightError for a NaN or infinite result.
    """
    values = weight_values(weight, block_scale, block)
    error = first_non_finite(values, weight, block_scale, block)
    if error is not None:
        raise error
    return values


def dequantize_float8_bf16(weight: Tensor, block_scale: Tensor, block: tuple[int, int]) -> Tensor:
    """bfloat16 weights [R, C] of FP8 rows, rounded once more from the float32 product, to nearest, ties to even.

    Arguments and errors as for `dequantize_float8`; a product that only BF16 cannot hold is refused as well.
    """
    values = weight_values(weight, block_scale, block)
    rounded = torch.where(torch.isnan(values), values.to(torch.bfloat16), bf16_bits(values).view(torch.bfloat16))
    error = first_non_finite(rounded, weight, block_scale, block)
    if error is not None:
        raise error
    return rounded
