"""BF16 rounding and |x| ** 0.4 as plain torch, step by step the same on every device."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.int4_spec import POWER_CUBIC, POWER_SEED, POWER_SLOPE
from memopt.kernels.layout import BF16_SHIFT, F32_MAGNITUDE_MASK, F32_MAX_BITS

_BF16_HALF = (1 << (BF16_SHIFT - 1)) - 1


def bf16_bits(value: Tensor) -> Tensor:
    """BF16 bits (int16) of float32 values that are not NaN, any shape; to nearest, ties to even.

    On bits, because a hardware conversion may flush subnormals to zero (VCVTNEPS2BF16 does).
    """
    bits = value.view(torch.int32)
    rounded = bits + (((bits >> BF16_SHIFT) & 1) + _BF16_HALF)
    return (rounded >> BF16_SHIFT).to(torch.int16)


def bf16_value(bits: Tensor) -> Tensor:
    """float32 values of BF16 bits (int16), any shape."""
    return (bits.to(torch.int32) << BF16_SHIFT).view(torch.float32)


def round_bf16(value: Tensor) -> Tensor:
    """float32 values rounded to the nearest BF16, still float32, any shape; no NaN."""
    return bf16_value(bf16_bits(value))


def power_04(value: Tensor) -> Tensor:
    """|value| ** 0.4 of float32 values, any shape, as `int4_spec` defines it; relative error up to 2.9e-5.

    The largest finite number stands in for infinity, so that the result is never negative.
    """
    bits = (value.view(torch.int32) & F32_MAGNITUDE_MASK).clamp(max=F32_MAX_BITS)
    x = bits.view(torch.float32)
    z = (POWER_SEED - bits.to(torch.float32) * POWER_SLOPE).to(torch.int32).view(torch.float32)
    square = z * z
    y = x * (square * z)
    h = 1.0 - y * square
    c0, c1, c2, c3 = POWER_CUBIC
    return y * (((c3 * h + c2) * h + c1) * h + c0)
