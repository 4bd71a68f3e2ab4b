"""The INT4 rounding kernels give the reference's bytes, error figures included; outputs start as garbage."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from kernel_cases import Source, as_bytes, gaussian_source, random_source

from memopt.kernels import fp8_int4_triton, int4_reference
from memopt.kernels.checks import NonFiniteWeightError
from memopt.kernels.int4_spec import Int4Spec, ScaleSearch

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


@pytest.fixture(autouse=True)
def _garbage_in_new_tensors() -> Iterator[None]:
    """torch.empty gives NaN or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _check(source: Source, spec: Int4Spec, *, may_fall_back: bool = False) -> None:
    """The bytes are equal; unless the test says so, what is compared comes from the kernel."""
    expected = as_bytes(int4_reference.quantize_int4(*source.tensors(), spec))
    with pytest.MonkeyPatch.context() as patch:
        if not may_fall_back:
            patch.delattr(fp8_int4_triton.int4_device, "quantize_int4")
        found = as_bytes(fp8_int4_triton.quantize_int4(*source.tensors(), spec))
    assert {name for name in expected if expected[name] != found[name]} == set()


@pytest.mark.parametrize("group", [32, 64])
def test_several_programs_with_ragged_edges(group: int) -> None:
    _check(random_source(9, 1280, (8, 128), seed=1), Int4Spec(group, "absmax"))


def test_gaussian_blocks() -> None:
    source = gaussian_source(128, 128, seed=2)
    _check(Source(source.weight[:24], source.scale, source.block), Int4Spec(32, "absmax"))


@pytest.mark.parametrize("search", ["mse", "mse-signed"])
def test_scale_search(search: ScaleSearch) -> None:
    _check(random_source(5, 96, (128, 128), seed=3), Int4Spec(32, search))


def test_the_other_norm() -> None:
    _check(random_source(3, 128, (128, 128), seed=4), Int4Spec(64, "mse-signed", "2.4"))


def test_long_groups_under_several_scales() -> None:
    _check(random_source(3, 256, (2, 64), seed=5), Int4Spec(128, "absmax"))
    _check(random_source(2, 128, (1, 32), seed=6), Int4Spec(128, "mse"))


@pytest.mark.parametrize("block", [(3, 40), (1, 200), (128, 8)])
def test_whole_rows_with_a_tail(block: tuple[int, int]) -> None:
    _check(random_source(4, 200, block, seed=7), Int4Spec(None, "absmax"))


def test_whole_rows_are_searched() -> None:
    _check(random_source(2, 40, (1, 40), seed=8), Int4Spec(None, "mse"))


def test_power_of_two_scales_make_exact_ties() -> None:
    source = random_source(8, 512, (8, 128), seed=9)
    assert source.scale is not None
    scale = np.exp2(np.random.default_rng(9).integers(-12, 4, source.scale.shape)).astype(np.float32)
    _check(Source(source.weight, scale, source.block), Int4Spec(32, "absmax"))


def test_a_tie_at_the_largest_weight() -> None:
    weight = np.array([[0x78, 0xF8, 0x4F, 0x00] * 8], np.uint8)  # 256 and -256 at a scale of 1 / 256, 7.5 = 1.875 * 4
    weight[0, 2] = 0x4F
    for scale in (15 / 256, -15 / 512, 7.5 / 256):
        _check(Source(weight, np.full((1, 1), scale, np.float32), (128, 128)), Int4Spec(32, "absmax"))


def test_zero_groups_and_negative_zeros() -> None:
    weight = np.zeros((2, 64), np.uint8)
    weight[1, :32] = 0x80
    weight[1, 40] = 0x01
    for search in ("absmax", "mse-signed"):
        _check(Source(weight, np.ones((1, 1), np.float32), (128, 128)), Int4Spec(32, search))


def test_bfloat16_patterns_of_ordinary_size() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    exponent = (bits >> 7) & 0xFF
    bits = bits[(exponent > 72) & (exponent < 184)].reshape(-1, 256)
    _check(Source(bits, None, None), Int4Spec(32, "absmax"))
    _check(Source(bits[::9], None, None), Int4Spec(128, "absmax"))


@pytest.mark.parametrize("exponent", [-149, -126, -103, 62, 85, 110, 119])
def test_scales_at_the_ends_of_float32(exponent: int) -> None:
    source = random_source(3, 64, (1, 64), seed=10, spread=0.3)
    assert source.scale is not None
    scale = (source.scale.astype(np.float64) * 2.0**exponent).astype(np.float32)
    _check(Source(source.weight, scale, source.block), Int4Spec(32, "absmax"), may_fall_back=True)


@pytest.mark.parametrize("group", [32, None])
def test_the_first_bad_weight_is_named(group: int | None) -> None:
    source = random_source(9, 64, (128, 128), seed=11)
    source.weight[7, 40] = 0xFF
    source.weight[8, 0] = 0x7F
    with pytest.raises(NonFiniteWeightError) as found:
        fp8_int4_triton.quantize_int4(*source.tensors(), Int4Spec(group, "absmax"))
    assert (found.value.row, found.value.column, found.value.bits) == (7, 40, 0xFF)


def test_no_rows_and_one_row() -> None:
    _check(random_source(1, 32, (128, 128), seed=12), Int4Spec(32, "absmax"))
    rows = fp8_int4_triton.quantize_int4(
        torch.zeros(0, 64, dtype=torch.uint8), torch.zeros(0, 1), (128, 128), Int4Spec(32)
    )
    assert rows.packed.shape == (0, 8)
    assert rows.scale_bits.shape == (0, 2)


def test_rows_at_an_odd_address() -> None:
    weight, scale, block = random_source(4, 64, (128, 128), seed=13).tensors()
    shifted = torch.cat((torch.zeros(1, dtype=torch.uint8), weight.flatten()))[1:].view(4, 64)
    assert shifted.data_ptr() % 2 == 1
    expected = int4_reference.quantize_int4(weight, scale, block, Int4Spec(32, "absmax"))
    found = fp8_int4_triton.quantize_int4(shifted, scale, block, Int4Spec(32, "absmax"))
    assert as_bytes(found) == as_bytes(expected)


def test_infinite_weights_are_named() -> None:
    bits = np.full((2, 64), 0x3F80, np.uint16)
    bits[1, 9] = 0xFF80
    with pytest.raises(NonFiniteWeightError) as found:
        fp8_int4_triton.quantize_int4(*Source(bits, None, None).tensors(), Int4Spec(32, "absmax"))
    assert (found.value.row, found.value.column) == (1, 9)


def test_rows_that_do_not_lie_one_after_another() -> None:
    source = random_source(4, 64, (128, 128), seed=13)
    weight, scale, block = source.tensors()
    strided = torch.stack((weight, weight), dim=1)[:, 0]
    assert not strided.is_contiguous()
    expected = int4_reference.quantize_int4(weight, scale, block, Int4Spec(32, "absmax"))
    found = fp8_int4_triton.quantize_int4(strided, scale, block, Int4Spec(32, "absmax"))
    assert torch.equal(found.packed, expected.packed)
