"""Line plots as inline SVG: linear or logarithmic height, grid, ticks, legend. No scripts, fonts or links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 280
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 16, 40
# Okabe & Ito's palette, told apart by most colour-blind readers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
NUM_TICKS = 5
# What a zero is drawn as on a logarithmic height, relative to the smallest value above it.
ZERO_FACTOR = 0.5
# Beyond these, a logarithmic height draws zero and the largest value: powers of ten must not overflow.
SMALLEST, LARGEST = 1e-98, 1e98


@dataclass(frozen=True, slots=True)
class Series:
    """One line: points (x, y), y not below zero."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Axes:
    """`is_log`: the height is logarithmic."""

    title: str
    x_label: str
    y_label: str
    is_log: bool = False


@dataclass(frozen=True, slots=True)
class _Scale:
    """Values `low` to `high`, after a logarithm if `is_log`, onto pixels `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        if self.is_log:
            value = min(max(math.log10(max(value, SMALLEST)), self.low), self.high)
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def line_plot(axes: Axes, series: Sequence[Series]) -> str:
    """An <svg> element with every series that has points; a sentence in <p> if none has.

    Markers show single points; text is escaped; the figure has a title and description for readers that cannot see it.
    """
    drawn = [line for line in series if line.points]
    if not drawn:
        return f"<p>{escape(axes.title)}: nothing was measured.</p>"
    xs = [x for line in drawn for x, _ in line.points]
    ys = [y for line in drawn for _, y in line.points]
    across = _linear(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    up = _logarithmic(ys) if axes.is_log else _linear(0.0, max(ys), HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(axes.title, quote=True)}">',
        f"<title>{escape(axes.title)}</title>",
    ]
    for value in _ticks(up):
        height = up.place(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for value in _ticks(across):
        place = across.place(value)
        parts.append(f'<text x="{place:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:.6g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(axes.x_label)}</text>')
    parts.append(
        f'<text x="14" y="{HEIGHT / 2}" transform="rotate(-90 14 {HEIGHT / 2})" text-anchor="middle">'
        f"{escape(axes.y_label)}</text>"
    )
    for number, line in enumerate(drawn):
        parts += _line(line, COLOURS[number % len(COLOURS)], number, across, up)
    return "".join([*parts, "</svg>"])


def _line(line: Series, colour: str, number: int, across: _Scale, up: _Scale) -> list[str]:
    """Polyline, markers and legend entry of one series."""
    places = [(across.place(x), up.place(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    height = TOP + 14 + 18 * number
    left = WIDTH - RIGHT + 12
    return [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{colour}"/>' for x, y in places),
        f'<rect x="{left}" y="{height - 8}" width="10" height="10" fill="{colour}"/>',
        f'<text x="{left + 15}" y="{height + 1}">{escape(line.name)}</text>',
    ]


def _linear(low: float, high: float, start: float, end: float) -> _Scale:
    return _Scale(low, high if high > low else low + 1.0, start, end)


def _logarithmic(values: Sequence[float]) -> _Scale:
    above = [min(value, LARGEST) for value in values if value > SMALLEST]
    if not above:
        return _linear(0.0, 1.0, HEIGHT - BOTTOM, TOP)
    smallest = min(above) * (ZERO_FACTOR if min(values) <= SMALLEST else 1.0)
    low, high = math.log10(smallest), math.log10(max(above))
    if high - low < 1.0:
        low, high = low - 0.5, high + 0.5
    return _Scale(low, high, HEIGHT - BOTTOM, TOP, is_log=True)


def _ticks(scale: _Scale) -> list[float]:
    """NUM_TICKS values, evenly spaced as drawn."""
    steps = [scale.low + (scale.high - scale.low) * number / (NUM_TICKS - 1) for number in range(NUM_TICKS)]
    return [10**step for step in steps] if scale.is_log else steps
