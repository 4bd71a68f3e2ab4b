"""Blocks of columns for tests of coordinate descent on codes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DescentBlock:
    """Gradients [E, B, R], Hessians [E, B, B], scales [E, R] of both signs, codes int8 [E, B, R] to start from."""

    gradient: Tensor
    hessian: Tensor
    scale: Tensor
    codes: Tensor


def make_descent_block(num_experts: int, num_columns: int, num_rows: int, seed: int) -> DescentBlock:
    """Gaussian weights under correlated inputs, from random codes."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_experts, 3 * num_columns, num_columns, generator=generator)
    hessian = inputs.mT @ inputs
    signs = torch.where(torch.rand(num_experts, num_rows, generator=generator) < 0.3, -1.0, 1.0)
    scale = (torch.rand(num_experts, num_rows, generator=generator) * 0.004 + 0.002).bfloat16().float() * signs
    codes = torch.randint(-8, 8, (num_experts, num_columns, num_rows), generator=generator, dtype=torch.int8)
    wanted = torch.randn(num_experts, num_columns, num_rows, generator=generator) * 0.02
    return DescentBlock(hessian @ (wanted - codes * scale[:, None]), hessian, scale, codes)
