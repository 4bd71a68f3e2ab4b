"""The experts of a mixture-of-experts layer on the CPU: one pair of products for each expert that a token chose."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from memopt.kernels.gemm.int4_gemm_cpu import int4_gemm_cpu
from memopt.kernels.gemm.int4_weight import Int4Weight
from memopt.kernels.gemm.moe_rows import ordered_choices, summed_choices
from memopt.kernels.gemm.silu_mul import silu_mul
from memopt.kernels.gemm.torch_int4_weight import TorchInt4Weight, torch_int4_product


def moe_gemm_cpu(
    x: Tensor,
    gate_up: Int4Weight | TorchInt4Weight,
    down: Int4Weight | TorchInt4Weight,
    expert_ids: Tensor,
    expert_weights: Tensor,
    out: Tensor,
) -> Tensor:
    """out [T, H]; checked by `moe_gemm`, which documents it. A TorchInt4Weight rounds x and its product to BF16."""
    # In the order of experts every expert's tokens are one slice.
    choices = ordered_choices(x, expert_ids, down.num_experts or 0)
    if not choices.starts[-1]:
        return out.zero_()
    hidden = silu_mul(_products(choices.rows, gate_up, choices.starts), x.dtype)
    return summed_choices(_products(hidden, down, choices.starts), choices, expert_weights, out)


def _products(rows: Tensor, weight: Int4Weight | TorchInt4Weight, starts: list[int]) -> Tensor:
    """Each expert's weight times its rows, [., N]: BF16 of a TorchInt4Weight, else float32."""
    counts = [after - first for first, after in pairwise(starts)]
    chosen = [index for index, count in enumerate(counts) if count]
    sizes = [counts[index] for index in chosen]
    if isinstance(weight, TorchInt4Weight):
        experts, parts = weight.experts, rows.to(torch.bfloat16).split_with_sizes(sizes)
        results = [torch_int4_product(part, experts[index]) for index, part in zip(chosen, parts, strict=True)]
        return torch.cat(results) if len(results) > 1 else results[0]
    products = torch.empty(rows.shape[0], weight.num_rows)
    for index, part in zip(chosen, rows.split_with_sizes(sizes), strict=True):
        int4_gemm_cpu(part, weight.expert(index), products[starts[index] : starts[index + 1]])
    return products
