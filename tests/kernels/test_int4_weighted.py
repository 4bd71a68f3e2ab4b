"""Scale search weighted by each column's importance: the same bytes everywhere, and the smallest weighted error."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import GROUPS, Source, as_bytes, gaussian_source, random_source, sources

from memopt.compressor.quantize.backend import CpuBackend, TorchBackend
from memopt.errors import ContentError, NonFiniteError, ShapeError, UsageError
from memopt.kernels import cpu, fp8_int4_triton, int4_device, int4_reference
from memopt.kernels.checks import NonFiniteWeightError
from memopt.kernels.float8_reference import weight_values
from memopt.kernels.int4_spec import SCALE_GRID, Int4Rows, Int4Spec
from memopt.kernels.number_reference import bf16_value, round_bf16

FloatArray = npt.NDArray[np.float32]


def _importance(columns: int, seed: int, spread: float = 1.5) -> FloatArray:
    return np.exp(spread * np.random.default_rng(seed).normal(size=columns)).astype(np.float32)


def _outcome(function: Any, *arguments: Any, **options: Any) -> Any:
    try:
        return as_bytes(function(*arguments, **options))
    except NonFiniteWeightError as error:
        return error.row, error.column, error.bits, str(error)


def _all_equal(source: Source, spec: Int4Spec, importance: FloatArray) -> Any:
    tensors, weighting = source.tensors(), torch.from_numpy(importance)
    expected = _outcome(int4_reference.quantize_int4, *tensors, spec, weighting)
    assert _outcome(cpu.quantize_int4, source.weight, source.scale, source.block, spec, importance) == expected
    assert _outcome(int4_device.quantize_int4, *tensors, spec, weighting) == expected
    assert _outcome(int4_device.quantize_int4, *tensors, spec, weighting, weights_a_step=1) == expected
    if isinstance(expected, dict):
        values = weight_values(*tensors)
        assert cpu.search_int4_scale(values.numpy(), spec, importance).tobytes() == expected["scale_bits"]
        for step in (1, 1 << 24):
            scales = int4_device.search_int4_scale(values, spec, weighting, weights_a_step=step)
            assert scales.view(torch.int16).numpy().tobytes() == expected["scale_bits"]
    return expected


@pytest.mark.parametrize("group", GROUPS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_bytes_any_importance(group: int | None, data: st.DataObject) -> None:
    source = data.draw(sources(group))
    columns = source.weight.shape[1]
    importance = _importance(columns, data.draw(st.integers(0, 99)), data.draw(st.sampled_from([0.0, 1.5, 12.0])))
    extreme = data.draw(st.sampled_from([1.0, 2.0**-149, 2.0**-126, 3e38]))
    importance[data.draw(st.integers(0, columns - 1))] = extreme
    _all_equal(source, Int4Spec(group, data.draw(st.sampled_from(["mse", "mse-signed"]))), importance)


@pytest.mark.parametrize("search", ["mse", "mse-signed"])
@pytest.mark.parametrize("group", GROUPS)
def test_ordinary_weights(group: int | None, search: Any) -> None:
    spec = Int4Spec(group, search)
    assert isinstance(_all_equal(gaussian_source(128, 384, seed=1), spec, _importance(384, 1)), dict)
    assert isinstance(_all_equal(random_source(67, 256, (64, 128), seed=2), spec, _importance(256, 2, 4.0)), dict)
    bits = np.random.default_rng(3).integers(0, 1 << 14, (5, 640), dtype=np.uint16)
    assert isinstance(_all_equal(Source(bits, None, None), spec, _importance(640, 3)), dict)


def test_equal_importance_changes_nothing() -> None:
    source = gaussian_source(128, 256, seed=4)
    spec = Int4Spec(32)
    plain = as_bytes(cpu.quantize_int4(source.weight, source.scale, source.block, spec))
    for value in (1.0, 0.25, 2.0**40):
        importance = np.full(256, value, np.float32)
        assert _all_equal(source, spec, importance) == plain


def test_no_factor_of_two_matters() -> None:
    source = gaussian_source(128, 256, seed=5)
    importance = _importance(256, 5)
    first = _all_equal(source, Int4Spec(64), importance)
    assert _all_equal(source, Int4Spec(64), importance * np.float32(2.0**-30)) == first


def test_the_bytes_of_this_rule() -> None:
    # The rule is part of releases: a change of these bytes is a change of format.
    source = gaussian_source(128, 256, seed=6)
    importance = np.random.default_rng(6).integers(1, 1000, 256).astype(np.float32)
    rows = cpu.quantize_int4(source.weight, source.scale, source.block, Int4Spec(32), importance)
    digest = hashlib.sha256(rows.packed.tobytes() + rows.scale_bits.tobytes()).hexdigest()
    assert digest == "ecb22696ee584e229c0f3fbd4557253188e0b36cfa219296bddb0bdb7f4c9dc0"


def _weighted_errors(groups: torch.Tensor, scale: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    """float64 [R, G] of groups [R, G, group] rounded under `scale` [R, G]."""
    each = scale.double()[..., None]
    codes = torch.round(groups.double() / each).clamp(-8, 7)
    return ((groups.double() - codes * each).square() * importance.double()).sum(dim=2)


def test_the_scale_is_the_best_of_the_grid_under_the_weights() -> None:
    source = gaussian_source(128, 256, seed=7)
    importance = _importance(256, 7)
    rows = cpu.quantize_int4(source.weight, source.scale, source.block, Int4Spec(32), importance)
    groups = weight_values(*source.tensors()).view(128, 8, 32)
    weighting = torch.from_numpy(importance).view(8, 32)
    found = _weighted_errors(groups, bf16_value(torch.from_numpy(rows.scale_bits.view(np.int16))), weighting)
    largest = groups.abs().amax(dim=2)
    for factor in SCALE_GRID:
        candidate = round_bf16(largest * torch.tensor(factor, dtype=torch.float32) / 7.5)
        for sign in (1, -1):
            assert bool((found <= _weighted_errors(groups, sign * candidate, weighting) * (1 + 1e-5)).all())
    plain = cpu.quantize_int4(source.weight, source.scale, source.block, Int4Spec(32))
    unweighted = _weighted_errors(groups, bf16_value(torch.from_numpy(plain.scale_bits.view(np.int16))), weighting)
    assert float(found.sum() / unweighted.sum()) < 0.85


def test_zero_weights_keep_scale_one_and_zeros_do_not_make_scale_zero() -> None:
    bits = np.zeros((2, 64), np.uint16)
    bits[1, 32] = 0x3F80
    rows = cpu.quantize_int4(bits, None, None, Int4Spec(32), _importance(64, 8))
    scales = bf16_value(torch.from_numpy(rows.scale_bits.view(np.int16)))
    assert scales[0].tolist() == [1.0, 1.0]
    assert scales[1, 0] == 1.0
    assert scales[1, 1] != 0


def test_backends_pass_the_importance_on() -> None:
    source = gaussian_source(128, 256, seed=9)
    importance = _importance(256, 9)

    def figures(rows: Int4Rows) -> dict[str, bytes]:
        return as_bytes(rows)

    found = [
        figures(backend.quantize(source.weight, source.scale, source.block, Int4Spec(32), importance))
        for backend in (CpuBackend(), TorchBackend("cpu"))
    ]
    assert found[0] == found[1]
    weighting = torch.from_numpy(importance)
    assert as_bytes(fp8_int4_triton.quantize_int4(*source.tensors(), Int4Spec(32), weighting)) == found[0]


@pytest.mark.parametrize(
    ("importance", "spec", "error"),
    [
        (np.ones(32, np.float32), Int4Spec(32), ShapeError),
        (np.ones(64, np.float64), Int4Spec(32), ShapeError),
        (np.ones((1, 64), np.float32), Int4Spec(32), ShapeError),
        (np.zeros(64, np.float32), Int4Spec(32), ContentError),
        (np.full(64, np.nan, np.float32), Int4Spec(32), ContentError),
        (np.full(64, np.inf, np.float32), Int4Spec(32), ContentError),
        (-np.ones(64, np.float32), Int4Spec(32), ContentError),
        (np.ones(64, np.float32), Int4Spec(32, "absmax"), UsageError),
        (np.ones(64, np.float32), Int4Spec(32, "mse", "2.4"), UsageError),
    ],
)
def test_refusals(importance: Any, spec: Int4Spec, error: type[Exception]) -> None:
    bits = np.zeros((2, 64), np.uint16)
    tensor, weighting = torch.from_numpy(bits.view(np.int16)), torch.from_numpy(importance)
    with pytest.raises(error):
        cpu.quantize_int4(bits, None, None, spec, importance)
    for function in (int4_reference.quantize_int4, int4_device.quantize_int4):
        with pytest.raises(error):
            function(tensor, None, None, spec, weighting)


def test_values_that_are_not_numbers_are_named() -> None:
    for bad in (np.nan, np.inf, -np.inf):
        values = np.ones((3, 64), np.float32)
        values[1, 40] = bad
        with pytest.raises(NonFiniteError, match="row 1, column 40"):
            cpu.search_int4_scale(values, Int4Spec(32))
        with pytest.raises(NonFiniteError, match="row 1, column 40"):
            int4_device.search_int4_scale(torch.from_numpy(values), Int4Spec(32))
    with pytest.raises(ShapeError, match="float64"):
        cpu.search_int4_scale(np.ones((3, 64)), Int4Spec(32))  # type: ignore[arg-type]
