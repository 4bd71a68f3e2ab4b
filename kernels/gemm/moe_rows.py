"""Compiles the loops of moe_rows_cpu.py on first use, and calls them with tensors on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memopt.kernels import cpu_number, layout
from memopt.kernels.compile_cache import compiled, source_digest
from memopt.kernels.gemm import moe_rows_cpu
from memopt.kernels.gemm.moe_rows_cpu import add_choices, choose_experts, order_choices
from memopt.kernels.kv_cache import kv_rows_cpu
from memopt.kernels.rows import row_values_cpu
from memopt.kernels.rows.row_arrays import new_rows, row_array

_SOURCES = (layout, cpu_number, kv_rows_cpu, row_values_cpu, moe_rows_cpu)


@dataclass(frozen=True, slots=True)
class OrderedChoices:
    """The choices of T tokens in the order of experts: expert e's are `starts[e]` to `starts[e + 1]`.

    `rows` [., H]: the row of x of each. `places` numpy int64 [T, k]: where each choice stands, -1 for another rank's.
    """

    starts: list[int]
    rows: Tensor
    places: Any


@cache
def _sources_key() -> str:
    """The digest that every entry closes over; cpu_entry.py says why."""
    return source_digest(*(str(module.__file__) for module in _SOURCES), __file__)


@cache
def _choose_entry() -> Callable[..., None]:
    key = _sources_key()

    @compiled
    def choose(*arguments: Any) -> Any:
        key  # noqa: B018 - makes it a closure variable
        return choose_experts(*arguments)

    return choose


@cache
def _order_entry() -> Callable[..., None]:
    key = _sources_key()

    @compiled
    def order(*arguments: Any) -> Any:
        key  # noqa: B018 - makes it a closure variable
        return order_choices(*arguments)

    return order


@cache
def _add_entry() -> Callable[..., None]:
    key = _sources_key()

    @compiled
    def add(*arguments: Any) -> Any:
        key  # noqa: B018 - makes it a closure variable
        return add_choices(*arguments)

    return add


def choose_on_cpu(
    products: Tensor,
    bias: Tensor,
    *,
    num_choices: int,
    num_groups: int,
    groups_per_token: int,
    is_renormalized: bool,
    smallest_sum: float,
    factor: float,
) -> tuple[Tensor, Tensor]:
    """Expert ids int64 [T, k], ascending in a row, and weights float32 [T, k], as runtime/model/router.py `route`.

    `products` float32 [T, E]: x @ router weight.T. Of equal choices the lower expert wins.
    """
    ids = torch.empty((products.shape[0], num_choices), dtype=torch.int64)
    weights = torch.empty((products.shape[0], num_choices), dtype=torch.float32)
    _choose_entry()(
        products.numpy(), bias.numpy(), num_groups, groups_per_token, is_renormalized, np.float32(smallest_sum),
        np.float32(factor), ids.numpy(), weights.numpy(),
    )  # fmt: skip
    return ids, weights


def ordered_choices(x: Tensor, expert_ids: Tensor, num_experts: int) -> OrderedChoices:
    """`expert_ids` int32 or int64 [T, k] in the order of experts, then of tokens, with the rows of x [T, H]."""
    starts, places = np.empty(num_experts + 1, dtype=np.int64), np.empty(expert_ids.shape, dtype=np.int64)
    rows, array = new_rows((expert_ids.numel(), x.shape[1]), x.dtype)
    _order_entry()(row_array(x), expert_ids.contiguous().numpy(), num_experts, starts, places, array)
    bounds = starts.tolist()
    return OrderedChoices(bounds, rows[: bounds[-1]], places)


def summed_choices(results: Tensor, choices: OrderedChoices, expert_weights: Tensor, out: Tensor) -> Tensor:
    """Fills out [T, H] with each token's weighted sum of results [., H], float32 and in the order of its choices."""
    _add_entry()(row_array(results), choices.places, expert_weights.contiguous().numpy(), row_array(out))
    return out
