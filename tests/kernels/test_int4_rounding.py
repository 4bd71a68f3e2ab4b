"""The fused divisions of int4_rounding_triton, in exact rational arithmetic: a GPU's fma, step by step."""

from __future__ import annotations

from fractions import Fraction
from math import floor, log2

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from memopt.kernels.int4_rounding_triton import SAFE_SCALE_MAX, SAFE_SCALE_MIN
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


def test_division_of_weights_beside_every_tie() -> None:
    for significand in BF16_SIGNIFICANDS:
        scale = Fraction(significand, 128)
        inverse = _round_f32(1 / scale)
        for half in range(1, 52, 2):
            tie = scale * half / 2
            unit = _round_f32(tie * (1 + Fraction(1, 1 << F32_MANTISSA_BITS))) - tie
            for x in (tie - unit, tie - unit / 2, tie, tie + unit):
                if _round_f32(x) == x:
                    assert _divide(x, scale, inverse) == _round_f32(x / scale)
                    # A weight that is not on a tie stays off it, so rounding the quotient rounds the exact one.
                    assert (_divide(x, scale, inverse) == Fraction(half, 2)) == (x == tie)


@given(st.floats(width=32, min_value=2.0**-90, max_value=2.0**90), st.sampled_from(BF16_SIGNIFICANDS))
def test_division_of_any_weight(weight: float, significand: int) -> None:
    scale = Fraction(significand, 128)
    assert _divide(Fraction(weight), scale, _round_f32(1 / scale)) == _round_f32(Fraction(weight) / scale)


@given(st.floats(width=32, min_value=SAFE_SCALE_MIN, max_value=SAFE_SCALE_MAX))
@example(7.5)
@example(float(np.nextafter(np.float32(15), np.float32(0))))
def test_division_by_half_the_span(largest: float) -> None:
    span = Fraction(INT4_HALF_SPAN)
    assert _divide(Fraction(largest), span, _round_f32(1 / span)) == _round_f32(Fraction(largest) / span)
