"""A Linear of a layer by its place: what is there, what its weight is, and the layer with another one in its stead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from memopt.errors import UnsupportedError
from memopt.kernels.float8_reference import weight_values
from memopt.runtime.model.decoder_layer import DecoderLayer
from memopt.runtime.model.linear import Linear
from memopt.runtime.weights.linears import DenseLinear, Fp8BlockLinear, RowParallelLinear, StackedLinear, WrappedLinear


@dataclass(frozen=True, slots=True)
class RecordedLinear(WrappedLinear):
    """A projection that hands on what it multiplies."""

    record: Callable[[Tensor], None]

    def __call__(self, x: Tensor) -> Tensor:
        """[M, N] of x [M, K]."""
        self.record(x)
        return self.linear(x)


def linear_at(layer: DecoderLayer, place: tuple[str, ...]) -> Linear:
    """The projection at `place`, as layer_targets.py names it."""
    found: Any = layer
    for name in place:
        found = getattr(found, name)
    return cast(Linear, found)


def with_linear(layer: DecoderLayer, place: tuple[str, ...], linear: Linear) -> DecoderLayer:
    """The layer with `linear` at `place`; everything else is shared."""
    return cast(DecoderLayer, _replaced(layer, place, linear))


def _replaced(part: Any, place: tuple[str, ...], linear: Linear) -> Any:
    if not place:
        return linear
    return replace(part, **{place[0]: _replaced(getattr(part, place[0]), place[1:], linear)})


def weight_of(linear: Linear) -> Tensor:
    """float32 [N, K]: the source's values, FP8 codes times their scales not rounded to BF16. A copy."""
    if isinstance(linear, DenseLinear):
        return linear.weight.to(torch.float32, copy=True)
    if isinstance(linear, Fp8BlockLinear):
        return weight_values(linear.codes.view(torch.uint8), linear.scale_inv, linear.block)
    if isinstance(linear, StackedLinear):
        return torch.cat([weight_of(part) for part in linear.parts])
    if isinstance(linear, RowParallelLinear):
        return weight_of(linear.linear)
    raise UnsupportedError(f"weights in the form of {type(linear).__name__} are not rounded")


def bias_of(linear: Linear) -> Tensor | None:
    """Its bias [N], if it has one."""
    if isinstance(linear, RowParallelLinear):
        return bias_of(linear.linear)
    return linear.bias if isinstance(linear, DenseLinear | Fp8BlockLinear) else None
