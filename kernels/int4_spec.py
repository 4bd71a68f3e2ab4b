"""What INT4 rounding is asked for, and what it gives back, the same for every implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

ScaleSearch = Literal["absmax", "mse", "mse-signed"]
ErrorNorm = Literal["2", "2.4"]

Array = TypeVar("Array")

# Factors of amax / 7.5 that the search tries, in this order; every one is used as a float32. Dense where groups of 32
# to 128 find their best (0.98 to 0.78), sparse elsewhere. Gaussian groups of 32, squared error below absmax: 27.4 %;
# 41 even steps of 0.02 reach 27.7 % in 1.4 times the time, 17 of 0.05 reach 26.1 %. The low end serves whole rows.
SCALE_GRID: tuple[float, ...] = (
    1.10, 1.03, 0.98, 0.955, 0.93, 0.905, 0.88, 0.855, 0.83, 0.805, 0.78,
    0.75, 0.70, 0.65, 0.60, 0.55, 0.50, 0.45, 0.40, 0.35, 0.30,
)  # fmt: skip

# |x| ** 0.4 in float32 without a library call (a libm may differ in the last bit between machines): a seed for
# x ** -0.2 from the exponent and mantissa bits (z = reinterpret(int(SEED - 0.2 * bits)), within 3.2 %), then
# y = x * z**3 * (1 - h) ** -0.6 with h = 1 - x * z**5, the last power as a cubic in h (Chebyshev on |h| <= 0.155).
# Largest relative error over all normal floats: 2.9e-5. Subnormals are only of the right order; zero gives zero.
POWER_SEED = 1277905408.0
POWER_SLOPE = 0.2
POWER_CUBIC: tuple[float, float, float, float] = (0.99997264, 0.5999748, 0.4891276, 0.4244012)


class BlockShape(NamedTuple):
    """Weights that share one FP8 scale: `rows` along out, `columns` along in."""

    rows: int
    columns: int


@dataclass(frozen=True)
class Int4Spec:
    """Symmetric INT4 rounding.

    `group_size`: weights that share one BF16 scale, along `in`; None means the whole row ("channel").
    `scale_search`: absmax (amax / 7.5), mse (smallest error over a grid), mse-signed (over both signs of the scale).
    `error_norm`: the exponent p of the searched error sum |w - scale * q| ** p.
    """

    group_size: int | None = 32
    scale_search: ScaleSearch = "mse-signed"
    error_norm: ErrorNorm = "2"


@dataclass(frozen=True)
class Int4Rows(Generic[Array]):
    """Rounded rows. R rows, C columns, G groups a row (C / group_size, or 1).

    `packed`: int32 [R, C / 8]. `scale_bits`: BF16 bits, uint16 (numpy) or int16 (torch) [R, G].
    `sq_error`: float64 [R], sum of (w - scale * q)**2. `energy`: float64 [R], sum of w**2.
    `max_error`: float32 [R], largest |w - scale * q|. `num_clipped`: int64 [R], weights rounded from outside -8..7.
    """

    packed: Array
    scale_bits: Array
    sq_error: Array
    energy: Array
    max_error: Array
    num_clipped: Array
