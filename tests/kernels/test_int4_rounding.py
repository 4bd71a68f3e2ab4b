"""The fused divisions of int4_rounding_triton, in exact rational arithmetic: a GPU's fma, step by step."""

from __future__ import annotations

from fractions import Fraction
from math import floor, log2

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from memopt.kernels.int4_rounding_triton import SAFE_SCALE_MAX, SAFE_SCALE_MIN, SAFE_SQUARE_MIN
from memopt.kernels.layout import F32_MANTISSA_BITS, INT4_HALF_SPAN

BF16_SIGNIFICANDS = range(128, 256)


def _round_f32(value: Fraction) -> Fraction:
    """The nearest float32 with an unbounded exponent, ties to even."""
    if value == 0:
        return value
    exponent = floor(log2(abs(value)))
    exponent += (abs(value) >= Fraction(2) ** (exponent + 1)) - (abs(value) < Fraction(2) ** exponent)
    unit = Fraction(2) ** (exponent - F32_MANTISSA_BITS)
    return round(value / unit) * unit


def _fma(a: Fraction, b: Fraction, c: Fraction) -> Fraction:
    return _round_f32(a * b + c)


def _divide(x: Fraction, divisor: Fraction, inverse: Fraction) -> Fraction:
    quotient = _round_f32(x * inverse)
    return _fma(_fma(-quotient, divisor, x), inverse, quotient)


def test_the_reciprocal_of_every_bfloat16_significand() -> None:
    for significand in BF16_SIGNIFICANDS:
        scale = Fraction(significand, 128)
        exact = _round_f32(1 / scale)
        for ulps in range(-4, 5):
            near = exact + ulps * Fraction(1, 1 << (F32_MANTISSA_BITS + 1))
            assert _fma(_fma(-scale, near, Fraction(1)), near, near) == exact, (significand, ulps)


def _split_reciprocal(scale: Fraction, ulps: int) -> tuple[Fraction, Fraction]:
    """`split_reciprocal` from a quotient that is `ulps` off."""
    near = _round_f32(1 / scale) + ulps * Fraction(1, 1 << (F32_MANTISSA_BITS + 1))
    residue = _fma(-scale, near, Fraction(1))
    assert residue == 1 - scale * near, "the residue is exact"
    return near, _round_f32(residue * near)


def _quotient(x: Fraction, inverse: tuple[Fraction, Fraction]) -> Fraction:
    return _fma(x, inverse[0], _round_f32(x * inverse[1]))


@pytest.mark.parametrize("ulps", [-2, -1, 0, 1, 2])
def test_weights_at_and_beside_every_tie(ulps: int) -> None:
    for significand in BF16_SIGNIFICANDS:
        scale = Fraction(significand, 128)
        inverse = _split_reciprocal(scale, ulps)
        for half in range(1, 52, 2):
            tie = scale * half / 2
            unit = _round_f32(tie * (1 + Fraction(1, 1 << F32_MANTISSA_BITS))) - tie
            for x in (tie - unit, tie - unit / 2, tie, tie + unit / 2, tie + unit):
                if _round_f32(x) == x:
                    # Only a weight on a tie gives a tie: rounding the quotient rounds w / s itself.
                    found = _quotient(x, inverse) - Fraction(half, 2)
                    assert (found > 0) - (found < 0) == (x > tie) - (x < tie), (significand, half, x)


@given(
    st.floats(width=32, min_value=2.0**-10, max_value=2.0**5),
    st.sampled_from(BF16_SIGNIFICANDS),
    st.integers(-2, 2),
)
def test_the_code_of_any_weight(weight: float, significand: int, ulps: int) -> None:
    scale = Fraction(significand, 128)
    quotient = _quotient(Fraction(weight), _split_reciprocal(scale, ulps))
    # FP16 subnormals and numpy's rint both round half to even; so does Fraction.
    assert round(quotient) == round(_round_f32(Fraction(weight) / scale)) == round(Fraction(weight) / scale)


@given(st.floats(width=32, min_value=2.0**-60, max_value=2.0**60))
@example(float(np.nextafter(np.float32(2), np.float32(0))))
@example(float(np.sqrt(np.float32(2))))
def test_the_root_of_a_rounded_square_is_the_number(x: float) -> None:
    square = torch.tensor(x, dtype=torch.float32).square()
    assert square.item() >= SAFE_SQUARE_MIN
    assert square.to(torch.float64).sqrt().to(torch.float32).item() == x


def test_the_root_of_every_rounded_square_of_two_binades() -> None:
    for start in range(1 << 23, 1 << 25, 1 << 21):
        x = torch.arange(start, start + (1 << 21), dtype=torch.int32)[:: 1 if start < 1 << 24 else 2].to(torch.float32)
        assert torch.equal((x * x).to(torch.float64).sqrt().to(torch.float32), x)


@given(st.floats(width=32, min_value=SAFE_SCALE_MIN, max_value=SAFE_SCALE_MAX))
@example(7.5)
@example(float(np.nextafter(np.float32(15), np.float32(0))))
def test_division_by_half_the_span(largest: float) -> None:
    span = Fraction(INT4_HALF_SPAN)
    assert _divide(Fraction(largest), span, _round_f32(1 / span)) == _round_f32(Fraction(largest) / span)
