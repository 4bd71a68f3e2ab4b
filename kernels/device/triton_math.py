"""Casts and products for Triton kernels that are right both compiled and in Triton's interpreter.

The interpreter is silently wrong for BF16 arithmetic and dots, truncates float32 -> BF16, and loses carries in
float32 -> e4m3 (triton 3.9; docs/kernels/gates.md, "The interpreter"). Kernels use these instead of `.to`.
"""

# Triton compiles these from the types it is called with.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import os

import triton
import triton.language as tl

# Triton reads the variable when it decorates: a process is either interpreted or compiling.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INTERPRETED = tl.constexpr(IS_INTERPRETED)


def constant(value):
    """A number of a module as kernels may read it: the compiler wants a constexpr, with which the interpreter fails
    where Python wants a number (`range`, `//` and `%` of numbers)."""
    return value if IS_INTERPRETED else tl.constexpr(value)


@triton.jit
def round_bf16(x):
    """BF16 of float32 `x`, nearest, ties to even, by integer arithmetic; NaN is not kept apart."""
    bits = x.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def to_bf16(x):
    """BF16 of float32 `x`: one instruction when compiled, `round_bf16` when interpreted."""
    if INTERPRETED:
        return round_bf16(x)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def bf16_bits_to_f32(bits):
    """float32 of BF16 bit patterns (any 16-bit integer type)."""
    return (bits.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def round_e4m3_bits(x):
    """e4m3fn bytes (uint8) of float32 `x`: nearest, ties to even, saturating at 448; NaN gives 0x7F."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, tl.minimum(code, 0x7E))
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e4m3_bits_to_f32(bits):
    """float32 of e4m3fn bytes (uint8), NaN bytes included, exact: the fields are shifted into place and rescaled."""
    wide = bits.to(tl.uint32)
    shifted = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
    value = shifted.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def matmul(a, b, acc):
    """acc + a @ b with float32 sums. BF16 operands are widened when interpreted; float32 ones are never made TF32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")
