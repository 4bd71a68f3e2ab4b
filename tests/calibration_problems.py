"""Tokens, Hessians and weights for tests of calibration."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from memopt.kernels.calibration.hessian import accumulate_hessian
from memopt.kernels.layout import INT4_HALF_SPAN


def make_tokens(num_tokens: int, size: int, seed: int = 0) -> Tensor:
    """BF16 activations [num_tokens, size]: channels of very different size, mixed a little."""
    generator = torch.Generator().manual_seed(seed)
    plain = torch.randn(num_tokens, size, generator=generator) * torch.randn(size, generator=generator).exp()
    mixed = plain + plain @ torch.randn(size, size, generator=generator) * (0.5 / size**0.5)
    return mixed.to(torch.bfloat16)


def make_offsets(*counts: int) -> Tensor:
    """int64 [E + 1] of tokens sorted by expert."""
    return torch.tensor([0, *counts], dtype=torch.int64).cumsum(0)


def make_symmetric(num_experts: int, size: int) -> Tensor:
    """Any symmetric float32 matrices [E, K, K]: a sum that was begun."""
    half = torch.randn(num_experts, size, size, generator=torch.Generator().manual_seed(9))
    return half + half.mT


def absmax_scale(weight: Tensor, group: int) -> Tensor:
    """BF16 scales [E, R, K / group] of the absmax rule, 1 for a group of zeros."""
    scale = (weight.unflatten(2, (-1, group)).abs().amax(dim=3) / INT4_HALF_SPAN).to(torch.bfloat16)
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def plain_codes(weight: Tensor, scale: Tensor) -> Tensor:
    """int8 codes of rounding to nearest."""
    each = scale.float().repeat_interleave(weight.shape[2] // scale.shape[2], dim=2)
    return torch.round(weight / each).clamp(-8, 7).to(torch.int8)


def losses(weight: Tensor, codes: Tensor, scale: Tensor, hessian: Tensor, damping: Tensor) -> Tensor:
    """float64 [E, R]: (w - q) H (w - q)^T with `damping` of the mean live diagonal added, that mean on dead ones."""
    each = scale.double().repeat_interleave(weight.shape[2] // scale.shape[2], dim=2)
    difference = weight.double() - codes.double() * each
    matrix = hessian.double().clone()
    diagonal = matrix.diagonal(dim1=1, dim2=2)
    is_live = diagonal != 0
    count = is_live.sum(dim=1)
    mean = torch.where(count > 0, diagonal.sum(dim=1) / count.clamp(min=1), 1.0)
    diagonal += (~is_live + damping[:, None]) * mean[:, None]
    return ((difference @ matrix) * difference).sum(dim=2)


@dataclass(frozen=True)
class Problem:
    """Weights [E, R, K], Hessians [E, K, K] of their inputs, scales [E, R, G]."""

    weight: Tensor
    hessian: Tensor
    scale: Tensor


def make_problem(counts: tuple[int, ...], num_rows: int, size: int, group: int = 32, seed: int = 0) -> Problem:
    """Gaussian weights and the Hessians of `counts` tokens for each expert."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(len(counts), num_rows, size, generator=generator) * 0.02
    hessian = torch.zeros(len(counts), size, size)
    accumulate_hessian(hessian, make_tokens(sum(counts), size, seed), make_offsets(*counts))
    return Problem(weight, hessian, absmax_scale(weight, group))


@dataclass(frozen=True)
class Block:
    """The inputs of a GPTQ block: weights [E, B, R], factor [E, B, B], scales [E, G, R], groups [E, B]."""

    weights: Tensor
    factor: Tensor
    scales: Tensor
    groups: Tensor


def make_block(num_experts: int, num_columns: int, num_rows: int, num_groups: int, seed: int) -> Block:
    """Random weights, an upper triangular factor with garbage below its diagonal, scales of both signs, any groups.

    The first column's weights lie at ties, where a product with 1 / scale rounds otherwise than a true division.
    """
    generator = torch.Generator().manual_seed(seed)
    factor = torch.randn(num_experts, num_columns, num_columns, generator=generator) * 0.3
    factor.diagonal(dim1=1, dim2=2).abs_().add_(0.5)
    scales = torch.rand(num_experts, num_groups, num_rows, generator=generator) * 0.004 + 0.002
    signs = torch.where(torch.rand(scales.shape, generator=generator) < 0.3, -1.0, 1.0)
    scales = scales.to(torch.bfloat16).to(torch.float32) * signs
    groups = torch.randint(num_groups, (num_experts, num_columns), generator=generator, dtype=torch.int32)
    weights = torch.randn(num_experts, num_columns, num_rows, generator=generator) * 0.02
    ties = torch.randint(-7, 7, (num_experts, num_rows), generator=generator) + 0.5
    for expert in range(num_experts):
        weights[expert, 0] = ties[expert] * scales[expert, int(groups[expert, 0])]
    return Block(weights, factor, scales, groups)
