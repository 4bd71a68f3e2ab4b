"""Group sizes by sensitivity: smaller groups where they save most error for the bytes of their scales."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.smollm2.probes.probe import bits_per_weight
from memopt.compressor.recipe import GroupSize
from memopt.errors import UsageError

# From few scales to many.
GROUP_SIZES: tuple[GroupSize, ...] = (128, 64, 32)
# Gate and up have twice the weights of down.
ROLE_SHARES = (2 / 3, 1 / 3)


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Weights that share a scale in one layer's routed experts."""

    gate_up: GroupSize
    down: GroupSize

    @property
    def bits_per_weight(self) -> float:
        """Codes and scales, a mean over the layer's weights."""
        sizes = (self.gate_up, self.down)
        return sum(share * bits_per_weight(int(size)) for share, size in zip(ROLE_SHARES, sizes, strict=True))


@dataclass(frozen=True, slots=True)
class LayerErrors:
    """Squared error that rounding gate and up, and rounding down, adds to a residual row, relative to the row's square.

    Means over the calibration tokens of ratios, so that a few huge rows (attention sinks) do not decide.
    """

    gate_up: float
    down: float


def choose_groups(errors: Mapping[GroupSize, Sequence[LayerErrors]], bits: float) -> tuple[LayerGroups, ...]:
    """A size of GROUP_SIZES for each layer and role, at most `bits` a weight in all and little error.

    `errors`: of uniform sizes, measured on the same tokens. Greedy: all start with the largest groups, and the step to
    the next smaller one that saves most error a bit is taken as long as the bytes allow; errors fall ever slower with
    bits, so that this is near the best. Raises UsageError for fewer bits than the largest groups need.
    """
    num_layers = len(errors[GROUP_SIZES[0]])
    places = [(layer, role) for layer in range(num_layers) for role in range(len(ROLE_SHARES))]
    curves = {(layer, role): [_role_error(errors[size][layer], role) for size in GROUP_SIZES] for layer, role in places}
    left = (bits - bits_per_weight(int(GROUP_SIZES[0]))) * num_layers
    if left < 0:
        raise UsageError(
            f"{bits:g} bits a weight are asked for, groups of {GROUP_SIZES[0]} take "
            f"{bits_per_weight(int(GROUP_SIZES[0])):g}",
            remedy="allow more",
        )
    chosen = dict.fromkeys(places, 0)
    waiting: list[tuple[float, tuple[int, int]]] = []

    def push(place: tuple[int, int]) -> None:
        step = chosen[place]
        if step + 1 < len(GROUP_SIZES):
            saved = curves[place][step] - curves[place][step + 1]
            heapq.heappush(waiting, (-saved / _cost(place[1], step), place))

    for place in places:
        push(place)
    while waiting:
        _, place = heapq.heappop(waiting)
        cost = _cost(place[1], chosen[place])
        # A tie in exact arithmetic may miss by a rounding error.
        if cost > left + 1e-9:
            continue
        left -= cost
        chosen[place] += 1
        push(place)
    return tuple(LayerGroups(*(GROUP_SIZES[chosen[layer, role]] for role in (0, 1))) for layer in range(num_layers))


def _cost(role: int, step: int) -> float:
    """Bits a weight of the layer that the next smaller groups add."""
    larger, smaller = (bits_per_weight(int(size)) for size in GROUP_SIZES[step : step + 2])
    return ROLE_SHARES[role] * (smaller - larger)


def _role_error(errors: LayerErrors, role: int) -> float:
    return (errors.gate_up, errors.down)[role]
