"""The three implementations of INT4 rounding give the same bytes, or the same refusal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import GROUPS, NORMS, SEARCHES, Source, as_bytes, gaussian_source, random_source, sources, specs

from memopt.kernels import cpu, int4_device, int4_reference
from memopt.kernels.checks import NonFiniteWeightError
from memopt.kernels.int4_spec import Int4Spec


def _outcome(function: Any, *arguments: Any, **options: Any) -> Any:
    try:
        return as_bytes(function(*arguments, **options))
    except NonFiniteWeightError as error:
        return error.row, error.column, error.bits, str(error)


def _all_equal(source: Source, spec: Int4Spec) -> Any:
    expected = _outcome(int4_reference.quantize_int4, *source.tensors(), spec)
    assert _outcome(cpu.quantize_int4, source.weight, source.scale, source.block, spec) == expected
    assert _outcome(int4_device.quantize_int4, *source.tensors(), spec) == expected
    assert _outcome(int4_device.quantize_int4, *source.tensors(), spec, weights_a_step=1) == expected
    return expected


@pytest.mark.parametrize("group", GROUPS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_bytes_any_scales(group: int | None, data: st.DataObject) -> None:
    _all_equal(data.draw(sources(group)), data.draw(specs(group)))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("group", GROUPS)
def test_ordinary_weights(group: int | None, search: Any, norm: Any) -> None:
    spec = Int4Spec(group, search, norm)
    assert isinstance(_all_equal(gaussian_source(128, 128, seed=1), spec), dict)
    assert isinstance(_all_equal(random_source(67, 256, (64, 128), seed=2), spec), dict)
    assert isinstance(_all_equal(random_source(5, 192 if group != 128 else 384, (128, 128), seed=3), spec), dict)
    assert isinstance(_all_equal(random_source(9, 640, (1, 640), seed=4, spread=8.0), spec), dict)


@pytest.mark.parametrize("exponent", [-149, -140, -133, -126, -60, 60, 118])
@pytest.mark.parametrize("norm", NORMS)
def test_ranges_of_float32(exponent: int, norm: Any) -> None:
    source = random_source(17, 256, (1, 256), seed=exponent + 200, spread=0.3)
    scale = (source.scale.astype(np.float64) * 2.0**exponent).astype(np.float32) if source.scale is not None else None
    for search in SEARCHES:
        _all_equal(Source(source.weight, scale, source.block), Int4Spec(32, search, norm))


def test_every_bfloat16_pattern() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    bits = bits[(bits & 0x7F80) != 0x7F80].reshape(-1, 256)
    for search in SEARCHES:
        assert isinstance(_all_equal(Source(bits, None, None), Int4Spec(32, search)), dict)


def test_power_of_two_scales_make_exact_ties() -> None:
    source = random_source(40, 512, (8, 128), seed=9)
    scale = np.exp2(np.random.default_rng(9).integers(-12, 4, source.scale.shape)).astype(np.float32)  # type: ignore[union-attr]
    for search in SEARCHES:
        assert isinstance(_all_equal(Source(source.weight, scale, source.block), Int4Spec(32, search)), dict)


def test_the_first_bad_weight_is_named_by_all() -> None:
    source = random_source(150, 384, (128, 128), seed=5)
    source.weight[140, 200] = 0xFF
    source.weight[149, 0] = 0x7F
    row, column, bits, text = _all_equal(source, Int4Spec(32))
    assert (row, column, bits) == (140, 200, 0xFF)
    assert "row 140, column 200" in text
    assert "0xFF" in text
