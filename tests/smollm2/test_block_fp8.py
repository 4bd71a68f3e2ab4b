"""Block FP8: scales, ragged blocks, distance to the weights, refusal."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.smollm2.block_fp8 import quantize_block_fp8
from memopt.errors import NonFiniteError
from memopt.kernels.float8_reference import dequantize_float8_bf16


@given(st.integers(1, 200), st.integers(1, 300), st.integers(0, 2**31 - 1))
@settings(max_examples=25, deadline=None)
def test_codes_are_as_near_as_e4m3_is(rows: int, columns: int, seed: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    codes, scale = quantize_block_fp8(weight, "w")
    assert codes.shape == weight.shape
    assert scale.shape == (-(-rows // 128), -(-columns // 128))
    every = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    error = (codes.to(torch.float32) * every - weight).abs()
    # Half a step of 3 mantissa bits, or half of the smallest subnormal 2**-9.
    assert (error <= torch.maximum(weight.abs() * 2**-4, every * 2**-10) * (1 + 1e-5)).all()
    assert codes.to(torch.float32).abs().max() == 448


def test_memopt_reads_it_as_written() -> None:
    weight = torch.randn(130, 200, generator=torch.Generator().manual_seed(1))
    codes, scale = quantize_block_fp8(weight, "w")
    every = scale.repeat_interleave(128, 0)[:130].repeat_interleave(128, 1)[:, :200]
    expected = (codes.to(torch.float32) * every).to(torch.bfloat16)
    assert torch.equal(dequantize_float8_bf16(codes, scale, (128, 128)), expected)


def test_zeros_have_a_scale_that_divides() -> None:
    codes, scale = quantize_block_fp8(torch.zeros(128, 256), "w")
    assert scale.tolist() == [[1.0, 1.0]]
    assert not codes.to(torch.float32).any()


def test_what_is_not_finite_is_refused_by_name() -> None:
    weight = torch.zeros(2, 2)
    weight[1, 1] = float("nan")
    with pytest.raises(NonFiniteError, match=r"model\.up"):
        quantize_block_fp8(weight, "model.up")
