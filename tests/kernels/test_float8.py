"""FP8 and UE8M0 decoding against torch's own types."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from kernel_cases import Source, random_source, sources

from memopt.errors import ShapeError
from memopt.kernels import cpu, float8_reference
from memopt.kernels.checks import NonFiniteWeightError
from memopt.kernels.ue8m0 import decode_ue8m0


def _cpu(source: Source) -> object:
    assert source.scale is not None
    assert source.block is not None
    try:
        return cpu.dequantize_float8_bf16(source.weight, source.scale, source.block).tobytes()
    except NonFiniteWeightError as error:
        return str(error)


def _reference(source: Source) -> object:
    weight, scale, block = source.tensors()
    assert scale is not None
    assert block is not None
    try:
        rows = float8_reference.dequantize_float8_bf16(weight, scale, block)
    except NonFiniteWeightError as error:
        return str(error)
    return rows.view(torch.int16).numpy().tobytes()


def test_every_e4m3_pattern() -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(1, 256)
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).to(torch.float32)
    for code in (0x7F, 0xFF):
        with pytest.raises(NonFiniteWeightError) as caught:
            cpu.dequantize_float8_bf16(codes[:, code : code + 1], np.ones((1, 1), np.float32), (128, 128))
        assert (caught.value.row, caught.value.column, caught.value.bits) == (0, 0, code)
    finite = codes[:, (codes[0] & 0x7F) != 0x7F]
    wanted = expected[:, (codes[0] & 0x7F) != 0x7F]
    one = np.ones((1, 2), np.float32)
    bits = cpu.dequantize_float8_bf16(finite, one, (128, 128))
    assert bits.tobytes() == wanted.to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    values = float8_reference.dequantize_float8(torch.from_numpy(finite), torch.from_numpy(one), (128, 128))
    assert values.numpy().tobytes() == wanted.numpy().tobytes()


@settings(max_examples=80, deadline=None)
@given(source=sources(None).filter(lambda source: source.scale is not None))
def test_any_bytes_any_scales(source: Source) -> None:
    assert _cpu(source) == _reference(source)


def test_against_plain_multiplication() -> None:
    source = random_source(577, 320, (128, 128), seed=1)
    weight, scale, block = source.tensors()
    assert scale is not None
    assert block is not None
    values = float8_reference.dequantize_float8(weight, scale, block)
    for row, column in ((0, 0), (127, 319), (128, 127), (576, 319), (576, 128)):
        code = weight[row, column].view(torch.float8_e4m3fn).to(torch.float32)
        assert values[row, column] == code * scale[row // 128, column // 128]
    assert _cpu(source) == _reference(source)


def test_a_product_that_only_bfloat16_cannot_hold() -> None:
    source = Source(np.full((1, 8), 0x38, np.uint8), np.array([[3.4e38]], np.float32), (128, 128))
    assert "row 0, column 0" in str(_cpu(source))
    assert _cpu(source) == _reference(source)
    weight, scale, block = source.tensors()
    assert scale is not None
    assert block is not None
    assert bool(torch.isfinite(float8_reference.dequantize_float8(weight, scale, block)).all())


def test_ue8m0() -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = decode_ue8m0(codes)
    assert values.dtype == np.float32
    assert np.isnan(values[255])
    assert [float(v) for v in values[:255]] == [2.0 ** (code - 127) for code in range(255)]
    theirs = torch.from_numpy(codes[1:255].copy()).view(torch.float8_e8m0fnu).to(torch.float32).numpy()
    assert values[1:255].tobytes() == theirs.tobytes()
    reference = float8_reference.decode_ue8m0(torch.from_numpy(codes).view(16, 16))
    assert np.array_equal(reference.reshape(-1).numpy(), values, equal_nan=True)
    for wrong in (codes.astype(np.int32), torch.zeros(2, dtype=torch.int32)):
        with pytest.raises(ShapeError, match="int32"):
            (decode_ue8m0 if isinstance(wrong, np.ndarray) else float8_reference.decode_ue8m0)(wrong)  # type: ignore[arg-type, operator]


def test_a_ue8m0_nan_is_refused_where_it_meets_a_weight() -> None:
    scale = decode_ue8m0(np.array([[127, 255]], np.uint8))
    with pytest.raises(NonFiniteWeightError, match="row 0, column 128"):
        cpu.dequantize_float8_bf16(np.zeros((3, 256), np.uint8), scale, (128, 128))


def test_wrong_dtypes_are_refused() -> None:
    one = torch.ones(1, 1)
    with pytest.raises(ShapeError, match="float16"):
        float8_reference.dequantize_float8(torch.zeros(2, 8, dtype=torch.float16), one, (128, 128))
    with pytest.raises(ShapeError, match="float64"):
        float8_reference.dequantize_float8(torch.zeros(2, 8, dtype=torch.uint8), one.double(), (128, 128))
    with pytest.raises(ShapeError, match="uint16"):
        cpu.dequantize_float8_bf16(np.zeros((2, 8), np.uint16), None, None)  # type: ignore[arg-type]
