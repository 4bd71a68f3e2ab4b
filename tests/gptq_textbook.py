"""Rounding with calibration data as the papers have it: float64, a column at a time; scales by the reference search."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from memopt.kernels import int4_reference
from memopt.kernels.int4_spec import Int4Spec

NUM_SWEEPS = 3


def second_moments(rows: Tensor) -> Tensor:
    """float64 [K, K]: the mean of x^T x over rows rounded to BF16, zeros of none."""
    values = rows.to(torch.bfloat16).double()
    return values.T @ values / max(len(values), 1)


@dataclass(frozen=True)
class TextbookRows:
    """`codes` int8 [R, K], `scale` float32 [R, G], and each row's error float64 [R] beside that of plain rounding."""

    codes: Tensor
    scale: Tensor
    error: Tensor
    plain_error: Tensor


def textbook_rows(weight: Tensor, hessian: Tensor, method: str, group: int, damping: float = 0.01) -> TextbookRows:
    """`weight` float32 [R, K] under `hessian` float64 [K, K], in float64 but for the scale search."""
    spec = Int4Spec(group, "mse-signed", "2")
    groups = weight.unflatten(1, (-1, group))
    plain_scale = int4_reference.search_scale(groups, spec)
    plain = _nearest(weight, plain_scale)
    if method == "weighted":
        hessian = hessian.diagonal().diag()
    diagonal = hessian.diagonal()
    mean = diagonal.sum() / (diagonal > 0).sum()
    damped = hessian + torch.diag((diagonal == 0) * mean + damping * mean)
    if method == "weighted":
        scale = int4_reference.search_scale(groups, spec, _importance(damped.diagonal(), group))
        codes = _nearest(weight, scale)
    else:
        order = torch.argsort(diagonal, descending=True, stable=True)
        upper = torch.linalg.cholesky(torch.linalg.inv(damped[order][:, order]), upper=True)
        cost = torch.empty_like(diagonal)
        cost[order] = 1 / upper.diagonal().square()
        scale = int4_reference.search_scale(groups, spec, _importance(cost, group))
        codes = _solved(weight, scale, upper, order)
        for _ in range(NUM_SWEEPS):
            codes, scale = _swept(weight, codes, scale, damped)
    error, plain_error = (_error(weight, *pair, hessian) for pair in ((codes, scale), (plain, plain_scale)))
    is_plain = plain_error < error
    return TextbookRows(
        torch.where(is_plain[:, None], plain, codes),
        torch.where(is_plain[:, None], plain_scale, scale),
        torch.minimum(error, plain_error),
        plain_error,
    )


def _importance(cost: Tensor, group: int) -> Tensor:
    return (cost / cost.max()).float().view(-1, group)


def _each(scale: Tensor, num_columns: int) -> Tensor:
    return scale.double().repeat_interleave(num_columns // scale.shape[1], dim=1)


def _nearest(weight: Tensor, scale: Tensor) -> Tensor:
    ratio = weight / scale.repeat_interleave(weight.shape[1] // scale.shape[1], dim=1)
    return torch.round(ratio).clamp(-8, 7).to(torch.int8)


def _error(weight: Tensor, codes: Tensor, scale: Tensor, hessian: Tensor) -> Tensor:
    difference = weight.double() - codes * _each(scale, weight.shape[1])
    return ((difference @ hessian) * difference).sum(dim=1)


def _solved(weight: Tensor, scale: Tensor, upper: Tensor, order: Tensor) -> Tensor:
    """Algorithm 1 of arXiv 2210.17323, a column at a time, columns by falling diagonal."""
    left, scales = weight.double()[:, order], _each(scale, weight.shape[1])[:, order]
    codes = torch.empty(weight.shape, dtype=torch.int8)
    for step, column in enumerate(order.tolist()):
        code = torch.round(left[:, step] / scales[:, step]).clamp(-8, 7)
        error = (left[:, step] - code * scales[:, step]) / upper[step, step]
        left[:, step:] -= torch.outer(error, upper[step, step:])
        codes[:, column] = code.to(torch.int8)
    return codes


def _swept(weight: Tensor, codes: Tensor, scale: Tensor, damped: Tensor) -> tuple[Tensor, Tensor]:
    """One visit of all groups: the scale by least squares, then one code after another (arXiv 2309.01885)."""
    values, scales, wanted = codes.double(), scale.double(), weight.double()
    group = weight.shape[1] // scale.shape[1]
    for index in range(scale.shape[1]):
        part = slice(index * group, (index + 1) * group)
        left = (wanted - values * _each(scales, weight.shape[1])) @ damped
        slope = (left[:, part] * values[:, part]).sum(dim=1)
        curvature = ((values[:, part] @ damped[part, part]) * values[:, part]).sum(dim=1)
        best = (scales[:, index] + slope / curvature).float().bfloat16().double()
        change = torch.where(torch.isfinite(best) & (best != 0), best - scales[:, index], 0.0)
        is_gain = 2 * change * slope > change.square() * curvature
        scales[:, index] += torch.where(is_gain, change, 0.0)
        left = (wanted - values * _each(scales, weight.shape[1])) @ damped[:, part]
        for offset in range(group):
            column = part.start + offset
            target = values[:, column] + left[:, offset] / damped[column, column] / scales[:, index]
            new = torch.round(target).clamp(-8, 7)
            left -= torch.outer((new - values[:, column]) * scales[:, index], torch.ones(group)) * damped[column, part]
            values[:, column] = new
    return values.to(torch.int8), scales.float()
