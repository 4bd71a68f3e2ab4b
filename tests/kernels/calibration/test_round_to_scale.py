"""Scales and plain codes of float32 weights: those of the rounding kernels; losses against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from memopt.errors import AlignmentError, ShapeError
from memopt.kernels import int4_reference
from memopt.kernels.calibration.round_to_scale import (
    diagonal_loss,
    expand_scale,
    hessian_loss,
    round_to_scale,
    search_scale,
)
from memopt.kernels.int4_spec import Int4Spec

GENERATOR = torch.Generator().manual_seed(0)
# BF16 values, so that the rounding kernels take the same weights.
WEIGHT = (torch.randn(12, 256, generator=GENERATOR) * 0.02).to(torch.bfloat16)
IMPORTANCE = torch.randn(256, generator=GENERATOR).exp()


@pytest.mark.parametrize("group_size", [32, 128, None])
@pytest.mark.parametrize("importance", [None, IMPORTANCE], ids=["plain", "weighted"])
def test_scales_and_codes_of_the_rounding_kernels(group_size: int | None, importance: torch.Tensor | None) -> None:
    spec = Int4Spec(group_size)
    expected = int4_reference.quantize_int4(WEIGHT, None, None, spec, importance)
    scale = search_scale(WEIGHT.float(), spec, importance)
    assert torch.equal(scale.view(torch.int16), expected.scale_bits)
    codes = round_to_scale(WEIGHT.float(), scale)
    assert torch.equal(int4_reference.pack_int4(codes), expected.packed)


def test_scales_are_spread_over_their_groups() -> None:
    scale = torch.tensor([[1.0, -2.0]], dtype=torch.bfloat16)
    assert expand_scale(scale, 6).tolist() == [[1.0, 1.0, 1.0, -2.0, -2.0, -2.0]]
    assert expand_scale(scale[None], 2).shape == (1, 1, 2)


def test_losses_against_float64() -> None:
    weight = WEIGHT.float()
    scale = search_scale(weight, Int4Spec(32))
    codes = round_to_scale(weight, scale)
    inputs = torch.randn(400, 256, generator=GENERATOR, dtype=torch.float64)
    hessian = inputs.T @ inputs / 400
    difference = weight.double() - codes.double() * expand_scale(scale, 256).double()
    expected = ((difference @ hessian) * difference).sum(1)
    torch.testing.assert_close(hessian_loss(weight, codes, scale, hessian.float()), expected, rtol=1e-5, atol=0)
    diagonal = hessian.diagonal()
    expected = (difference.square() * diagonal).sum(1)
    torch.testing.assert_close(diagonal_loss(weight, codes, scale, diagonal.float()), expected, rtol=1e-6, atol=0)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ShapeError, match="float32"):
        search_scale(WEIGHT, Int4Spec(32))
    with pytest.raises(AlignmentError, match="40 weights"):
        search_scale(torch.ones(2, 40), Int4Spec(32))
    with pytest.raises(ShapeError, match="importance"):
        search_scale(WEIGHT.float(), Int4Spec(32), torch.from_numpy(np.ones(8, np.float32)))
