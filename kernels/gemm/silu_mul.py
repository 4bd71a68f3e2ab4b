"""The activation of a gated MLP: silu(gate) * up."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.rows.layer_rows import has_row_kernels, silu_mul_on_cpu


def silu_mul(gate_up: Tensor, rounded_to: torch.dtype) -> Tensor:
    """silu(gate) * up of gate_up [.., 2 * I] (the gate's I first), float32 inside, rounded once to `rounded_to`.

    Written with exp: torch's sigmoid gives an element other bits in a vector than at the end of a tensor.
    """
    if has_row_kernels(gate_up) and gate_up.ndim == 2 and rounded_to in (gate_up.dtype, torch.bfloat16):
        return silu_mul_on_cpu(gate_up, rounded_to)
    gate, up = gate_up.to(torch.float32).chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(rounded_to)
