"""Casts of triton_math: every e4m3 and BF16 pattern, and float32 where rounding is decided, bit for bit as torch."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from memopt.kernels.device.triton_math import (
    bf16_bits_to_f32,
    e4m3_bits_to_f32,
    matmul,
    round_bf16,
    round_e4m3_bits,
    to_bf16,
)
from memopt.kernels.layout import E4M3_MAX

E4M3_PATTERNS = 1 << 8
BF16_PATTERNS = 1 << 16


@triton.jit
def _e4m3_to_f32(source, result, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(result + at, e4m3_bits_to_f32(tl.load(source + at)))


@triton.jit
def _bf16_to_f32(source, result, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(result + at, bf16_bits_to_f32(tl.load(source + at)))


@triton.jit
def _f32_to_bf16(source, rounded, cast, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    value = tl.load(source + at)
    tl.store(rounded + at, round_bf16(value))
    tl.store(cast + at, to_bf16(value))


@triton.jit
def _f32_to_e4m3(source, result, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(result + at, round_e4m3_bits(tl.load(source + at)))


@triton.jit
def _product(a, b, result, SIZE: tl.constexpr):
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    at = row * SIZE + column
    sums = matmul(tl.load(a + at), tl.load(b + at), tl.full([SIZE, SIZE], 1.0, tl.float32))
    tl.store(result + at, sums)


def _f32(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).view(torch.float32)


def _around(values: torch.Tensor) -> torch.Tensor:
    """Each float32 value, the next one up and the next one down, both signs; a power of two many."""
    bits = values.view(torch.int32)
    near = torch.cat((bits, bits + 1, (bits - 1).clamp(min=0)))
    near = torch.cat((near, near ^ torch.tensor(-(1 << 31), dtype=torch.int32)))
    size = 1 << (near.numel() - 1).bit_length()
    return _f32(torch.cat((near, near[: size - near.numel()])))


def test_every_e4m3_pattern_widens_as_torch_widens() -> None:
    bits = torch.arange(E4M3_PATTERNS, dtype=torch.uint8)
    result = torch.full((E4M3_PATTERNS,), torch.nan)
    _e4m3_to_f32[(1,)](bits, result, SIZE=E4M3_PATTERNS)
    expected = bits.view(torch.float8_e4m3fn).to(torch.float32)
    assert torch.equal(result.isnan(), expected.isnan())
    assert int(result.isnan().sum()) == 2
    assert torch.equal(result.nan_to_num(0).view(torch.int32), expected.nan_to_num(0).view(torch.int32))


def test_every_bf16_pattern_widens_as_torch_widens() -> None:
    bits = torch.arange(BF16_PATTERNS, dtype=torch.int32).to(torch.int16)
    result = torch.zeros(BF16_PATTERNS)
    _bf16_to_f32[(1,)](bits, result, SIZE=BF16_PATTERNS)
    assert torch.equal(result.view(torch.int32), bits.view(torch.bfloat16).to(torch.float32).view(torch.int32))


def _check_bf16(values: torch.Tensor) -> None:
    rounded = torch.zeros(values.shape, dtype=torch.bfloat16)
    cast = torch.zeros_like(rounded)
    _f32_to_bf16[(1,)](values, rounded, cast, SIZE=values.numel())
    expected = values.to(torch.bfloat16).view(torch.int16)
    assert torch.equal(rounded.view(torch.int16), expected)
    assert torch.equal(cast.view(torch.int16), expected)


def test_bf16_rounding_of_every_pattern_and_every_midpoint() -> None:
    upper = torch.arange(0x7F80, dtype=torch.int32) << 16  # every finite magnitude, subnormals included
    _check_bf16(_around(_f32(upper)))
    _check_bf16(_around(_f32(upper + 0x8000)))


def test_bf16_rounding_of_any_float32() -> None:
    bits = torch.randint(-(1 << 31), 1 << 31, (BF16_PATTERNS,), dtype=torch.int64).to(torch.int32)
    values = _f32(bits)
    _check_bf16(torch.where(values.isnan(), 1.0, values))


def _check_e4m3(values: torch.Tensor) -> None:
    result = torch.full(values.shape, 0xA5, dtype=torch.uint8)
    _f32_to_e4m3[(1,)](values, result, SIZE=values.numel())
    # torch gives NaN above 464; the kernel saturates.
    expected = values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(result, expected)


def test_e4m3_rounding_at_every_value_and_midpoint() -> None:
    magnitudes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    _check_e4m3(_around(magnitudes))
    _check_e4m3(_around((magnitudes[:-1] + magnitudes[1:]) / 2))


def test_e4m3_rounding_of_subnormals_large_numbers_and_any_float32() -> None:
    _check_e4m3(_around(torch.tensor([2.0**-9, 2.0**-10, 2.0**-11, 1e-30, 2.0**-149, 448.0, 464.0, 1e30, 3.4e38])))
    bits = torch.randint(-(1 << 31), 1 << 31, (BF16_PATTERNS,), dtype=torch.int64).to(torch.int32)
    values = _f32(bits)
    _check_e4m3(torch.where(values.isnan(), 1.0, values))
    _check_e4m3(torch.randn(BF16_PATTERNS) * 100)


def test_e4m3_rounding_of_infinities_and_nan() -> None:
    values = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])
    result = torch.zeros(4, dtype=torch.uint8)
    _f32_to_e4m3[(1,)](values, result, SIZE=4)
    assert result.tolist()[:2] == [0x7E, 0xFE]
    assert result[2] & 0x7F == 0x7F
    assert result[3] == 0


def test_bf16_products_are_those_of_float64() -> None:
    size = 32
    a = torch.randn(size, size).to(torch.bfloat16)
    b = torch.randn(size, size).to(torch.bfloat16)
    result = torch.full((size, size), torch.nan)
    _product[(1,)](a, b, result, SIZE=size)
    expected = a.double() @ b.double() + 1
    assert (result.double() - expected).abs().max() < 1e-5
