"""Packed bytes: golden words, there and back, and compressed-tensors as the judge."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import GROUPS, gaussian_source, random_source

from memopt.errors import ShapeError
from memopt.kernels import cpu, int4_reference
from memopt.kernels.int4_spec import Int4Spec


def test_golden_word() -> None:
    codes = torch.tensor([[-8, -7, -6, -5, -4, -3, -2, -1]], dtype=torch.int8)
    assert int4_reference.pack_int4(codes).tolist() == [[0x76543210]]
    codes = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7]], dtype=torch.int8)
    assert int4_reference.pack_int4(codes).view(torch.uint8).tolist() == [[0x98, 0xBA, 0xDC, 0xFE]]


def test_golden_row_of_the_cpu_path() -> None:
    # Scale 7.5 / 7.5 = 1: the codes are the weights, 7.5 (e4m3 0x4F) rounds to 8 and is clipped to 7.
    values = torch.tensor([[-7.5, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7.5] + [0.0] * 16])
    weight = values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    rows = cpu.quantize_int4(weight, np.ones((1, 1), np.float32), (128, 128), Int4Spec(32, "absmax"))
    assert rows.packed.view(np.uint32).tolist() == [[0x76543210, 0xFEDCBA98, 0x88888888, 0x88888888]]
    assert rows.scale_bits.tolist() == [[0x3F80]]
    assert rows.num_clipped.tolist() == [1]
    assert rows.max_error.tolist() == [0.5]
    assert rows.sq_error.tolist() == [0.5]
    assert rows.energy.tolist() == [2 * 7.5**2 + sum(k * k for k in range(1, 8)) + sum(k * k for k in range(1, 7))]


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 4), words=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
def test_there_and_back_as_compressed_tensors_does(rows: int, words: int, seed: int) -> None:
    codes = torch.from_numpy(np.random.default_rng(seed).integers(-8, 8, (rows, words * 8), dtype=np.int8))
    packed = int4_reference.pack_int4(codes)
    assert torch.equal(packed, pack_to_int32(codes, 4))
    assert torch.equal(int4_reference.unpack_int4(packed), codes)
    assert torch.equal(unpack_from_int32(packed, 4, codes.shape), codes)


@pytest.mark.parametrize("group", GROUPS)
def test_dequantized_as_compressed_tensors_does(group: int | None) -> None:
    for source in (gaussian_source(128, 256, seed=3), random_source(7, 384, (1, 384), seed=4)):
        rows = cpu.quantize_int4(source.weight, source.scale, source.block, Int4Spec(group, "mse-signed"))
        scale = torch.from_numpy(rows.scale_bits.view(np.int16)).view(torch.bfloat16)
        assert bool((scale < 0).any())
        assert bool((scale > 0).any())
        packed = torch.from_numpy(rows.packed)
        strategy = "channel" if group is None else "group"
        args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy=strategy, group_size=group)
        theirs = dequantize(unpack_from_int32(packed, 4, torch.Size(source.weight.shape)), scale, args=args)
        ours = cpu.dequantize_int4(rows.packed, rows.scale_bits, group)
        assert theirs.dtype == torch.bfloat16
        # -0.0 from a code 0 under a negative scale is the same number.
        assert torch.equal(theirs, torch.from_numpy(ours.view(np.int16)).view(torch.bfloat16))
        reference = int4_reference.dequantize_int4(packed, scale, group)
        assert reference.view(torch.int16).numpy().tobytes() == ours.tobytes()


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShapeError, match="multiples of 8"):
        int4_reference.pack_int4(torch.zeros(2, 12, dtype=torch.int8))
    with pytest.raises(ShapeError, match="int32"):
        int4_reference.unpack_int4(torch.zeros(2, 12, dtype=torch.int64))
    packed = np.zeros((2, 8), np.int32)
    for scales, group in (((2, 3), 32), ((3, 2), 32), ((2, 2), None), ((2, 2), 48), ((4,), 32)):
        with pytest.raises(ShapeError):
            cpu.dequantize_int4(packed, np.zeros(scales, np.uint16), group)
    with pytest.raises(ShapeError, match="no columns"):
        cpu.dequantize_int4(packed[:, :0], np.zeros((2, 0), np.uint16), None)
    with pytest.raises(ShapeError, match="int64"):
        cpu.dequantize_int4(packed.astype(np.int64), np.zeros((2, 2), np.uint16), 32)  # type: ignore[arg-type]
