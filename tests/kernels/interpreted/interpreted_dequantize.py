"""The dequantize kernels give the reference's bits and refuse what it refuses."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from kernel_cases import Source, random_source

from memopt.errors import NonFiniteError
from memopt.kernels import dequantize_reference, dequantize_triton, int4_reference
from memopt.kernels.checks import NonFiniteWeightError

DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _garbage_in_new_tensors() -> Iterator[None]:
    """torch.empty gives NaN or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.int16), b.view(torch.int16))


def _check_float8(source: Source, dtype: torch.dtype) -> None:
    weight, scale, block = source.tensors()
    assert scale is not None
    assert block is not None
    found = dequantize_triton.dequantize_float8(weight, scale, block, dtype)
    assert _same(found, dequantize_reference.dequantize_float8(weight, scale, block, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_float8_pattern_under_many_scales(dtype: torch.dtype) -> None:
    bits = np.tile(np.arange(256, dtype=np.uint8), (64, 1))
    bits[(bits & 0x7F) == 0x7F] = 0
    # FP16 subnormals, its largest numbers, BF16 ties.
    scale = np.exp2(np.random.default_rng(1).uniform(-30, 7, (64, 1))).astype(np.float32)
    _check_float8(Source(bits, scale, (1, 256)), dtype)


@pytest.mark.parametrize("block", [(128, 128), (32, 128), (2, 64), (3, 40), (1, 264)])
def test_float8_blocks_and_ragged_edges(block: tuple[int, int]) -> None:
    _check_float8(random_source(35, 264, block, seed=2), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "group"), [(32, 32), (576, 64), (264, None)])
def test_int4(columns: int, group: int | None, dtype: torch.dtype) -> None:
    codes = torch.randint(-8, 8, (17, columns))
    scales = torch.randn(17, columns // (group or columns)).to(torch.bfloat16)
    packed = int4_reference.pack_int4(codes)
    found = dequantize_triton.dequantize_int4(packed, scales, group, dtype)
    assert _same(found, dequantize_reference.dequantize_int4(packed, scales, group, dtype))


def test_every_code_under_every_bfloat16_scale_of_ordinary_size() -> None:
    bits = torch.arange(0x2000, 0x7000, dtype=torch.int32).to(torch.int16)
    codes = torch.arange(-8, 8).repeat(bits.numel() // 16, 8)
    scales = bits.view(-1, 16)
    packed = int4_reference.pack_int4(codes[:, :128])
    found = dequantize_triton.dequantize_int4(packed, scales, 8, torch.bfloat16)
    assert _same(found, dequantize_reference.dequantize_int4(packed, scales, 8, torch.bfloat16))


def test_a_float8_nan_and_an_overflow_are_named() -> None:
    weight = torch.zeros(40, 200, dtype=torch.uint8)
    weight[33, 150] = 0xFF
    with pytest.raises(NonFiniteWeightError, match="row 33, column 150"):
        dequantize_triton.dequantize_float8(weight, torch.ones(1, 2), (128, 128), torch.bfloat16)
    weight[33, 150] = 0x7E
    scale = torch.full((1, 2), 146.25)
    with pytest.raises(NonFiniteWeightError, match="row 33, column 150"):
        dequantize_triton.dequantize_float8(weight, scale, (128, 128), torch.float16)
    _check_float8(Source(weight.numpy(), scale.numpy(), (128, 128)), torch.bfloat16)
    _check_float8(Source(weight.numpy(), scale.numpy() - np.float32(0.25), (128, 128)), torch.float16)


def test_an_int4_overflow_is_named() -> None:
    packed = int4_reference.pack_int4(torch.tensor([[0, 0, 0, 7, 0, 0, 0, 0]]))
    with pytest.raises(NonFiniteError, match="row 0, column 3"):
        dequantize_triton.dequantize_int4(packed, torch.full((1, 1), 16384.0).bfloat16(), None, torch.float16)


def test_no_rows_and_one_row() -> None:
    empty = torch.zeros(0, 64, dtype=torch.uint8)
    assert dequantize_triton.dequantize_float8(empty, torch.zeros(0, 1), (128, 128), torch.float16).shape == (0, 64)
    packed, scales = torch.zeros(0, 8, dtype=torch.int32), torch.zeros(0, 2, dtype=torch.int16)
    assert dequantize_triton.dequantize_int4(packed, scales, 32, torch.bfloat16).shape == (0, 64)
    _check_float8(random_source(1, 8, (128, 128), seed=3), torch.bfloat16)
