"""Targets that take over what earlier rounding did to a projection's inputs.

A projection reads x of the quantized stream, and its output should be W x_float. Least squares over the calibration
tokens gives the target W' = W C (H + r I)^-1 with C = E[x_float x^T] and H = E[x x^T]; then W' is rounded under H as W
would be. With W' = W + W (C - H) (H + r I)^-1 the ridge r pulls towards W and not towards zero, and a share of the
change may be taken (Arai and Ichikawa, "Quantization Error Propagation", arXiv 2504.09629).
"""

from __future__ import annotations

import torch
from torch import Tensor


def target_weight(
    weight: Tensor, float_rows: Tensor, rows: Tensor, hessian: Tensor, share: float, ridge: float
) -> Tensor:
    """float32 [R, K]: `weight` moved by `share` of the way to the regression of W x_float on x.

    `weight` float32 [R, K]; `float_rows`, `rows` float32 [T, K], the same tokens in both streams; `hessian` float32
    [K, K], the mean of x^T x over `rows`; `ridge`: share of its mean diagonal.
    """
    change = float_rows.sub(rows).T @ rows / rows.shape[0]
    return weight + share * (weight.to(torch.float64) @ regression(change, hessian, ridge)).to(torch.float32)


def residual_target(missing: Tensor, rows: Tensor, hessian: Tensor, share: float, ridge: float) -> Tensor:
    """float32 [R, K] to add to a weight: `share` of the regression of `missing` float32 [T, R] on `rows` [T, K]."""
    return share * regression(missing.T @ rows / rows.shape[0], hessian, ridge).to(torch.float32)


def regression(covariance: Tensor, hessian: Tensor, ridge: float) -> Tensor:
    """float64 [R, K]: covariance (H + r I)^-1, r `ridge` of H's mean live diagonal; a dead column gets zeros.

    `covariance` float32 [R, K]; `hessian` float32 [K, K], symmetric and positive semidefinite.
    """
    damped = hessian.to(torch.float64)
    diagonal = damped.diagonal()
    is_dead = diagonal == 0
    mean = diagonal.sum() / (~is_dead).sum().clamp(min=1)
    damped = damped + torch.diag(ridge * mean + is_dead.to(torch.float64))
    lower = torch.linalg.cholesky(damped)
    return torch.cholesky_solve(covariance.to(torch.float64).T, lower).T
