"""The experts of a mixture-of-experts layer in plain torch, written to be read. It defines the result."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.gemm.int4_gemm_reference import weight_values
from memopt.kernels.gemm.int4_weight import Int4Weight
from memopt.kernels.gemm.planar import PlanarWeight
from memopt.kernels.gemm.row_tiles import tiled_matmul
from memopt.kernels.gemm.silu_mul import silu_mul


def moe_gemm_reference(
    x: Tensor,
    gate_up: Int4Weight | PlanarWeight,
    down: Int4Weight | PlanarWeight,
    expert_ids: Tensor,
    expert_weights: Tensor,
    out: Tensor,
) -> Tensor:
    """out [T, H] = the weighted sum over a token's experts, in the order of its choices; see `moe_gemm`.

    Products and sums are float32. Rounded are only the hidden values (to x's type) and the result (to the type of
    `out`).
    """
    values = x.to(torch.float32)
    choices = torch.zeros(*expert_ids.shape, x.shape[1], device=x.device)
    for expert in range(down.num_experts or 0):
        token, choice = (expert_ids == expert).nonzero(as_tuple=True)
        if len(token):
            gates = tiled_matmul(values[token], weight_values(gate_up.expert(expert)))
            hidden = silu_mul(gates, x.dtype).to(torch.float32)
            choices[token, choice] = tiled_matmul(hidden, weight_values(down.expert(expert)))
    total = torch.zeros_like(values)
    for place in range(expert_ids.shape[1]):
        total = total + expert_weights[:, place, None] * choices[:, place]
    return out.copy_(total)
