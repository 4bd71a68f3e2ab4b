"""Stored tensors whose sizes config.json gives away: a weight that does not fit is refused, never broadcast."""

from __future__ import annotations

from torch import Tensor

from memopt.errors import ShapeError, UsageError
from memopt.runtime.model.linear import Linear
from memopt.runtime.weights.layer_tensors import LayerTensors
from memopt.runtime.weights.linear_builder import build_linear
from memopt.runtime.weights.load_options import LoadOptions


def sized_linear(
    tensors: LayerTensors,
    module_name: str,
    num_rows: int,
    num_columns: int,
    options: LoadOptions,
    *,
    has_bias: bool = False,
) -> Linear:
    """`build_linear`, of this many rows and columns. Raises ShapeError for others, and what `build_linear` raises."""
    linear = build_linear(tensors, module_name, options, has_bias=has_bias)
    require_size(tensors.prefix + module_name, (linear.num_rows, linear.num_columns), (num_rows, num_columns))
    return linear


def sized_tensor(tensors: LayerTensors, name: str, shape: tuple[int, ...], options: LoadOptions) -> Tensor:
    """A norm, bias or embedding in the type of activations, on their device. MissingTensorError, ShapeError."""
    tensor = tensors.take(name)
    require_size(tensors.prefix + name, tuple(tensor.shape), shape)
    return tensor.to(options.device, options.dtype)


def require_size(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """ShapeError unless the stored tensor `name` has the size that config.json asks for on this rank."""
    if found != wanted:
        raise ShapeError(
            f"the weight is {list(found)}, but config.json asks for {list(wanted)}",
            tensor=name,
            remedy="check that config.json belongs to these weights, and the number of ranks to these files",
        )


def share_of_rank(total: int, what: str, options: LoadOptions) -> int:
    """This rank's share of `total` heads, rows or columns. Raises UsageError where ranks do not divide them."""
    num_ranks = options.communicator.num_ranks
    if total % num_ranks:
        raise UsageError(f"{total} {what} cannot be cut over {num_ranks} ranks", remedy=f"use a divisor of {total}")
    return total // num_ranks
