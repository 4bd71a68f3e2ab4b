"""The experts of a mixture-of-experts layer in plain torch, written to be read. It defines the result."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.gemm.int4_gemm_reference import weight_values
from memopt.kernels.gemm.int4_weight import Int4Weight
from memopt.kernels.gemm.planar import PlanarWeight


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of gate_up float32 [.., 2 * I] (the gate's I first), rounded to BF16, still float32."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(torch.bfloat16).to(torch.float32)


def moe_gemm_reference(
    x: Tensor,
    gate_up: Int4Weight | PlanarWeight,
    down: Int4Weight | PlanarWeight,
    expert_ids: Tensor,
    expert_weights: Tensor,
    out: Tensor,
) -> Tensor:
    """out [T, H] = the weighted sum over a token's experts, in the order of its choices; see `moe_gemm`.

    Products and sums are float32. Rounded are only the hidden values (to BF16) and the result (to the type of `out`).
    """
    values = x.to(torch.float32)
    choices = torch.zeros(*expert_ids.shape, x.shape[1], device=x.device)
    for expert in range(down.num_experts or 0):
        token, choice = (expert_ids == expert).nonzero(as_tuple=True)
        if len(token):
            hidden = silu_mul(values[token] @ weight_values(gate_up.expert(expert)).T)
            choices[token, choice] = hidden @ weight_values(down.expert(expert)).T
    total = torch.zeros_like(values)
    for place in range(expert_ids.shape[1]):
        total = total + expert_weights[:, place, None] * choices[:, place]
    return out.copy_(total)
