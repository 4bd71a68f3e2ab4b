"""Dequantized tensors: the references against float64, the CPU path against the references, and every refusal."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import random_source

from memopt.errors import NonFiniteError, ShapeError, UnsupportedError
from memopt.kernels import dequantize, dequantize_reference, int4_reference
from memopt.kernels.checks import NonFiniteWeightError
from memopt.kernels.int4_spec import Int4Spec

DTYPES = (torch.bfloat16, torch.float16)
BLOCKS = ((128, 128), (1, 4096), (2, 64), (3, 40))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_float8_pattern_is_rounded_once_from_the_float32_product(dtype: torch.dtype) -> None:
    bits = torch.arange(256, dtype=torch.uint8)[None]
    bits[(bits & 0x7F) == 0x7F] = 0
    scale = torch.tensor([[0.0123456]])
    exact = bits.view(torch.float8_e4m3fn).to(torch.float64) * scale.to(torch.float64)
    expected = exact.to(torch.float32).to(dtype)
    for function in (dequantize_reference.dequantize_float8, dequantize.dequantize_float8):
        assert _same(function(bits, scale, (128, 256), dtype), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 9), words=st.integers(1, 40), block=st.sampled_from(BLOCKS), seed=st.integers(0, 999))
def test_float8_on_the_cpu(dtype: torch.dtype, rows: int, words: int, block: tuple[int, int], seed: int) -> None:
    weight, scale, _ = random_source(rows, 8 * words, block, seed).tensors()
    assert scale is not None
    expected = dequantize_reference.dequantize_float8(weight, scale, block, dtype)
    assert _same(dequantize.dequantize_float8(weight, scale, block, dtype), expected)
    strided = torch.stack((weight, weight), dim=1)[:, 0].view(torch.float8_e4m3fn)
    assert _same(dequantize.dequantize_float8(strided, scale, block, dtype), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 9), groups=st.integers(1, 6), size=st.sampled_from((32, 64, None)), seed=st.integers(0, 999))
def test_int4_on_the_cpu(dtype: torch.dtype, rows: int, groups: int, size: int | None, seed: int) -> None:
    columns = groups * (size or 8)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-8, 8, (rows, columns), generator=generator)
    scales = torch.randn(rows, 1 if size is None else groups, generator=generator).to(torch.bfloat16)
    packed = int4_reference.pack_int4(codes)
    exact = codes.to(torch.float64).view(rows, scales.shape[1], -1) * scales.to(torch.float64)[..., None]
    expected = exact.flatten(1).to(torch.float32).to(dtype)  # the product fits in float32
    for function in (dequantize_reference.dequantize_int4, dequantize.dequantize_int4):
        assert _same(function(packed, scales, size, dtype), expected)
        assert _same(function(packed, scales.view(torch.int16), size, dtype), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows_are_expanded_in_steps(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequantize, "CPU_STEP_WEIGHTS", 700)
    weight, scale, block = random_source(150, 640, (128, 128), seed=4).tensors()
    assert scale is not None
    assert block is not None
    expected = dequantize_reference.dequantize_float8(weight, scale, block, dtype)
    assert _same(dequantize.dequantize_float8(weight, scale, block, dtype), expected)


def test_an_int4_export_reads_back() -> None:
    weight, scale, block = random_source(4, 128, (128, 128), seed=5).tensors()
    rows = int4_reference.quantize_int4(weight, scale, block, Int4Spec(32))
    found = dequantize.dequantize_int4(rows.packed, rows.scale_bits, 32, torch.bfloat16)
    assert _same(found, int4_reference.dequantize_int4(rows.packed, rows.scale_bits, 32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_float8_nan_is_refused(dtype: torch.dtype, byte: int) -> None:
    weight = torch.zeros(3, 16, dtype=torch.uint8)
    weight[2, 9] = byte
    with pytest.raises(NonFiniteWeightError, match="row 2, column 9"):
        dequantize.dequantize_float8(weight, torch.ones(1, 1), (128, 128), dtype)


def test_what_float16_cannot_hold_is_refused() -> None:
    weight = torch.full((2, 8), 0x7E, dtype=torch.uint8)  # 448
    scale = torch.tensor([[146.0]])
    assert torch.isfinite(dequantize.dequantize_float8(weight, scale, (128, 128), torch.float16)).all()  # 65408
    scale = torch.tensor([[146.25]])  # 65520 is halfway to 65536
    with pytest.raises(NonFiniteWeightError, match="row 0, column 0"):
        dequantize.dequantize_float8(weight, scale, (128, 128), torch.float16)
    assert torch.isfinite(dequantize.dequantize_float8(weight, scale, (128, 128), torch.bfloat16)).all()
    packed = int4_reference.pack_int4(torch.tensor([[0, 0, 0, 7, 0, 0, 0, 0]]))
    large = torch.tensor([[16384.0]]).to(torch.bfloat16)
    with pytest.raises(NonFiniteError, match=r"row 0, column 3 .* float16 .* 16384\.0"):
        dequantize.dequantize_int4(packed, large, None, torch.float16)
    infinite = torch.tensor([[torch.inf]]).to(torch.bfloat16)
    with pytest.raises(NonFiniteError, match=r"row 0, column 0 .* bfloat16"):
        dequantize.dequantize_int4(packed, infinite, None, torch.bfloat16)


def test_no_rows() -> None:
    empty = torch.zeros(0, 64, dtype=torch.uint8)
    for dtype in DTYPES:
        assert dequantize.dequantize_float8(empty, torch.zeros(0, 1), (128, 128), dtype).shape == (0, 64)
        packed, scales = torch.zeros(0, 8, dtype=torch.int32), torch.zeros(0, 2, dtype=torch.int16)
        assert dequantize.dequantize_int4(packed, scales, 32, dtype).shape == (0, 64)


def test_what_does_not_fit_is_refused() -> None:
    weight, scale, half = torch.zeros(2, 256, dtype=torch.uint8), torch.ones(1, 2), torch.float16
    with pytest.raises(UnsupportedError, match="float32"):
        dequantize.dequantize_float8(weight, scale, (128, 128), torch.float32)
    with pytest.raises(ShapeError, match=r"\[1, 2\].*needs \[1, 4\]"):
        dequantize.dequantize_float8(weight, scale, (128, 64), half)
    with pytest.raises(ShapeError, match="bfloat16"):
        dequantize.dequantize_float8(weight.to(torch.bfloat16), scale, (128, 128), half)
    with pytest.raises(ShapeError, match="float64"):
        dequantize.dequantize_float8(weight, scale.double(), (128, 128), half)
    with pytest.raises(ShapeError, match="meta"):
        dequantize.dequantize_float8(weight, scale.to("meta"), (128, 128), half)
    packed = torch.zeros(2, 8, dtype=torch.int32)
    with pytest.raises(ShapeError, match=r"\[2, 3\].*\[2, 2\]"):
        dequantize.dequantize_int4(packed, torch.zeros(2, 3, dtype=torch.int16), 32, half)
    with pytest.raises(ShapeError, match="int64"):
        dequantize.dequantize_int4(packed.long(), torch.zeros(2, 2, dtype=torch.int16), 32, half)
