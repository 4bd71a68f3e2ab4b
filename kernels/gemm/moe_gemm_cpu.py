"""The experts of a mixture-of-experts layer on the CPU: one pair of products for each expert that a token chose."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from memopt.kernels.gemm.int4_gemm_cpu import int4_gemm_cpu
from memopt.kernels.gemm.int4_weight import Int4Weight
from memopt.kernels.gemm.silu_mul import silu_mul
from memopt.kernels.gemm.torch_int4_weight import TorchInt4Weight, torch_int4_gemm


@dataclass(frozen=True, slots=True)
class ExpertRun:
    """Rows `first` to `after` of the choices in the order of experts belong to expert `expert`."""

    expert: int
    first: int
    after: int


def moe_gemm_cpu(
    x: Tensor,
    gate_up: Int4Weight | TorchInt4Weight,
    down: Int4Weight | TorchInt4Weight,
    expert_ids: Tensor,
    expert_weights: Tensor,
    out: Tensor,
) -> Tensor:
    """out [T, H]; checked by `moe_gemm`, which documents it. A TorchInt4Weight rounds x and its product to BF16."""
    num_choices = expert_ids.shape[1]
    # A sort, so that every expert's tokens are one slice: at few tokens looking them up costs as much as the products.
    ordered, order = expert_ids.flatten().sort(stable=True)
    runs = expert_runs(ordered.tolist(), down.num_experts or 0)
    gathered = x[order // max(num_choices, 1)]
    gates = torch.zeros(len(order), gate_up.num_rows)
    for run in runs:
        rows = slice(run.first, run.after)
        _product(gathered[rows], gate_up.expert(run.expert), gates[rows])
    hidden = silu_mul(gates, x.dtype)
    results = torch.zeros(len(order), down.num_rows)
    for run in runs:
        rows = slice(run.first, run.after)
        _product(hidden[rows], down.expert(run.expert), results[rows])
    choices = torch.empty_like(results).index_copy_(0, order, results).view(*expert_ids.shape, down.num_rows)
    total = torch.zeros(x.shape[0], down.num_rows)
    for place in range(num_choices):
        total += expert_weights[:, place, None] * choices[:, place]
    return out.copy_(total)


def expert_runs(ordered_ids: list[int], num_experts: int) -> list[ExpertRun]:
    """The runs of equal ids of an ascending list; ids outside 0 to num_experts - 1 are left out."""
    runs: list[ExpertRun] = []
    first = 0
    for place in range(1, len(ordered_ids) + 1):
        if place == len(ordered_ids) or ordered_ids[place] != ordered_ids[first]:
            if 0 <= ordered_ids[first] < num_experts:
                runs.append(ExpertRun(ordered_ids[first], first, place))
            first = place
    return runs


def _product(values: Tensor, weight: Int4Weight | TorchInt4Weight, out: Tensor) -> Tensor:
    if isinstance(weight, Int4Weight):
        return int4_gemm_cpu(values, weight, out)
    return torch_int4_gemm(values, weight, out)
