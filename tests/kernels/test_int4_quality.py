"""What the rounding promises about errors, in numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import GROUPS, NORMS, Source, gaussian_source, random_source, sources

from memopt.kernels import cpu, cpu_search_error, float8_reference, int4_reference, number_reference
from memopt.kernels.checks import NonFiniteWeightError
from memopt.kernels.int4_spec import SCALE_GRID, Int4Rows, Int4Spec


def _parts(source: Source, spec: Int4Spec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Int4Rows]:
    """Weights [R, G, group], codes [R, G, group], scales [R, G, 1] as float32, and the rows."""
    rows = cpu.quantize_int4(source.weight, source.scale, source.block, spec)
    weight = float8_reference.weight_values(*source.tensors())
    scale = number_reference.bf16_value(torch.from_numpy(rows.scale_bits.view(np.int16)))
    groups = weight.view(*scale.shape, -1)
    codes = int4_reference.unpack_int4(torch.from_numpy(rows.packed)).view(groups.shape).to(torch.float32)
    return groups, codes, scale[..., None], rows


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_error_is_at_most_half_a_step_except_where_clipped(data: st.DataObject) -> None:
    source = data.draw(sources(32))
    try:
        groups, codes, scale, _rows = _parts(source, Int4Spec(32, data.draw(st.sampled_from(["absmax", "mse-signed"]))))
    except NonFiniteWeightError:
        return
    # float64 holds codes * scale and the difference exactly, so the bound needs no slack.
    quotient = groups.double() / scale.double()
    inside = (quotient >= -8.5) & (quotient <= 7.5)
    error = (groups.double() - codes.double() * scale.double()).abs()
    assert bool((error <= scale.double().abs() / 2)[inside].all())
    assert bool((codes[quotient < -8.5] == -8).all())
    assert bool((codes[quotient > 7.5] == 7).all())


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("group", GROUPS)
def test_a_larger_search_never_loses(group: int | None, norm: Any) -> None:
    # In the error that the search compares: its codes come from a reciprocal, so the final codes' error can differ near
    # ties (by less than one part in 10**6 of a group's error).
    for source in (gaussian_source(128, 256, seed=6), random_source(9, 384, (4, 128), seed=7)):
        searched, final = {}, {}
        for search in ("absmax", "mse", "mse-signed"):
            groups, _, scale, rows = _parts(source, Int4Spec(group, search, norm))
            scale = scale[..., 0]
            positive = int4_reference.scale_error(groups, scale.abs(), False, norm)
            negative = int4_reference.scale_error(groups, scale.abs(), True, norm)
            searched[search] = torch.where(scale < 0, negative, positive)
            final[search] = rows.sq_error.sum()
        assert bool((searched["mse"] <= searched["absmax"]).all())
        assert bool((searched["mse-signed"] <= searched["mse"]).all())
        if norm == "2":
            assert final["mse-signed"] <= final["mse"] * (1 + 1e-6) <= final["absmax"] * (1 + 1e-5)


def test_gaussian_groups_of_32_gain_a_fifth() -> None:
    source = gaussian_source(256, 1024, seed=8)
    error = {
        search: cpu.quantize_int4(source.weight, source.scale, source.block, Int4Spec(32, search)).sq_error.sum()  # type: ignore[arg-type]
        for search in ("absmax", "mse-signed")
    }
    assert error["mse-signed"] < 0.8 * error["absmax"]


def test_figures_match_their_definition() -> None:
    source = gaussian_source(128, 256, seed=10)
    groups, codes, scale, rows = _parts(source, Int4Spec(64, "mse"))
    difference = groups - codes * scale
    assert np.allclose(rows.sq_error, difference.double().square().sum(dim=(1, 2)), rtol=1e-5)
    assert np.allclose(rows.energy, groups.double().square().sum(dim=(1, 2)), rtol=1e-5)
    assert np.array_equal(rows.max_error, difference.abs().amax(dim=(1, 2)))
    rounded = torch.round(groups / scale)
    assert np.array_equal(rows.num_clipped, ((rounded < -8) | (rounded > 7)).sum(dim=(1, 2)))
    assert int(rows.num_clipped.sum()) > 0


@pytest.mark.parametrize("search", ["absmax", "mse", "mse-signed"])
def test_zero_groups_have_scale_one(search: Any) -> None:
    weight = np.zeros((3, 96), np.uint8)
    weight[0, 40] = 0x38
    weight[1] = 0x80  # minus zero
    rows = cpu.quantize_int4(weight, np.ones((1, 1), np.float32), (128, 128), Int4Spec(32, search))
    assert rows.scale_bits[0, 0] == rows.scale_bits[1, 0] == rows.scale_bits[2, 2] == 0x3F80
    assert (rows.packed[1:].view(np.uint32) == 0x88888888).all()
    assert rows.sq_error[1] == rows.energy[1] == rows.max_error[1] == rows.num_clipped[1] == 0
    # So small that amax / 7.5 is zero in BF16: also scale 1 and codes 0.
    tiny = np.full((1, 1), 2.0**-149, np.float32)
    rows = cpu.quantize_int4(np.full((1, 32), 0x38, np.uint8), tiny, (128, 128), Int4Spec(32, search))
    assert rows.scale_bits[0, 0] == 0x3F80
    assert (rows.packed.view(np.uint32) == 0x88888888).all()


def test_power_04_against_the_library() -> None:
    bits = np.concatenate([np.arange(0x00800000, 0x7F800000, 40_009), [0x00800000, 0x7F7FFFFF, 0x3F800000]])
    values = bits.astype(np.uint32).view(np.float32)
    powers = number_reference.power_04(torch.from_numpy(values)).numpy()
    expected = np.array([math.pow(float(value), 0.4) for value in values])
    assert np.abs(powers / expected - 1).max() < 3e-5
    special = np.array([0.0, -0.0, -32.0, 1e-45, np.inf], np.float32)
    result = number_reference.power_04(torch.from_numpy(special)).numpy()
    assert result[0] == result[1] == 0
    assert result[2] == pytest.approx(4, rel=3e-5)
    assert (result[3:] > 0).all()
    assert np.isfinite(result).all()
    for value in np.concatenate([special, values[::997]]):
        assert cpu_search_error.power_04(value) == number_reference.power_04(torch.tensor([value]))[0]


def test_the_grid_descends_within_its_bounds() -> None:
    assert list(SCALE_GRID) == sorted(set(SCALE_GRID), reverse=True)
    assert (SCALE_GRID[0], SCALE_GRID[-1]) == (1.10, 0.30)
