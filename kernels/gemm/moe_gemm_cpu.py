"""The experts of a mixture-of-experts layer on the CPU: one pair of products for each expert that a token chose."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.gemm.int4_gemm_cpu import int4_gemm_cpu
from memopt.kernels.gemm.int4_weight import Int4Weight
from memopt.kernels.gemm.silu_mul import silu_mul
from memopt.kernels.gemm.torch_int4_weight import TorchInt4Weight, torch_int4_gemm


def moe_gemm_cpu(
    x: Tensor,
    gate_up: Int4Weight | TorchInt4Weight,
    down: Int4Weight | TorchInt4Weight,
    expert_ids: Tensor,
    expert_weights: Tensor,
    out: Tensor,
) -> Tensor:
    """out [T, H]; checked by `moe_gemm`, which documents it. A TorchInt4Weight rounds x and its product to BF16."""
    num_experts = down.num_experts or 0
    choices = torch.zeros(*expert_ids.shape, down.num_rows)
    is_here = (expert_ids >= 0) & (expert_ids < num_experts)
    for expert in torch.unique(expert_ids[is_here]).tolist():
        token, choice = (expert_ids == expert).nonzero(as_tuple=True)
        hidden = silu_mul(_product(x[token], gate_up.expert(expert)), x.dtype)
        choices[token, choice] = _product(hidden, down.expert(expert))
    total = torch.zeros(x.shape[0], down.num_rows)
    for place in range(expert_ids.shape[1]):
        total += expert_weights[:, place, None] * choices[:, place]
    return out.copy_(total)


def _product(values: Tensor, weight: Int4Weight | TorchInt4Weight) -> Tensor:
    product = torch.empty(values.shape[0], weight.num_rows)
    if isinstance(weight, Int4Weight):
        return int4_gemm_cpu(values, weight, product)
    return torch_int4_gemm(values, weight, product)
