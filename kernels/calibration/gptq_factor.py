"""From a Hessian to the triangular factor that GPTQ walks along: damping, dead columns, order, Cholesky, inverse.

With H = M M^T for an upper triangular M, the factor is U = M^-1: then U is upper triangular and U^T U = H^-1, so it is
the upper Cholesky factor of the inverse, without forming the inverse. M is the Cholesky factor of H with rows and
columns reversed. In float64: Hessians of calibration data have condition numbers of 1e4 and more once damped, where
float32 leaves errors of 3e-4 in U (of its diagonal), float64 of 4e-13, and this way costs what the usual three steps
(Cholesky, inverse, Cholesky) cost in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from memopt.errors import ContentError
from memopt.kernels.calibration.gptq_options import GptqOptions

# If Cholesky fails, damping rises tenfold from at least the first of these, at most to the second.
MIN_RAISED_DAMPING = 1e-3
MAX_DAMPING = 10.0
# Of the largest diagonal element, which bounds the others: float32 sums in two orders differ by much less.
SYMMETRY_TOLERANCE = 1e-4
DAMPING_FACTOR = 10.0
# Triangles up to this size are inverted by a triangular solve, larger ones by halves.
SOLVED_SIZE = 256


@dataclass(frozen=True)
class GptqFactor:
    """Of one Hessian [K, K], its columns in `order` (int64 [K]; step -> column).

    `upper`: float32 [K, K], U with U^T U = H^-1. `root`: float32 [K, K], M = U^-1 with M M^T = H. Both are upper
    triangular.
    `damping`: the share of the mean diagonal that was added.
    """

    upper: Tensor
    root: Tensor
    order: Tensor
    damping: float
    num_dead_columns: int


def factorize_hessian(hessian: Tensor, options: GptqOptions, *, expert: int = 0) -> GptqFactor:
    """The factor of one finite, symmetric Hessian, float32 [K, K], on its device; working memory: four float64 [K, K].

    A column with a zero on the diagonal gets the mean of the others there (1 if there is none): it depends on no other,
    so that it is rounded to nearest. Damping is a share of the same mean: a Hessian may have any positive factor.
    Raises ContentError, naming `expert`, for a Hessian that is not symmetric (Cholesky would read one triangle and say
    nothing), and when even MAX_DAMPING does not make it positive definite.
    """
    diagonal = hessian.diagonal().to(torch.float64)
    is_dead = diagonal == 0
    num_dead = int(is_dead.sum())
    num_columns = hessian.shape[0]
    mean = float(diagonal.sum()) / (num_columns - num_dead) if num_dead < num_columns else 1.0
    asymmetry = float((hessian - hessian.mT).abs().max())
    if asymmetry > SYMMETRY_TOLERANCE * float(diagonal.abs().max()):
        raise ContentError(
            f"the Hessian of expert {expert}, {list(hessian.shape)}, is not symmetric: an element and its mirror image "
            f"differ by {asymmetry:g}, its largest diagonal element is {float(diagonal.abs().max()):g}",
            remedy="fill both triangles, as accumulate_hessian does",
        )
    if options.act_order:
        order = torch.argsort(diagonal, descending=True, stable=True)
    else:
        order = torch.arange(num_columns, device=hessian.device)
    backwards = order.flip(0)
    damping = options.damping
    while True:
        matrix = hessian[backwards][:, backwards].to(torch.float64)
        matrix.diagonal().add_(mean * is_dead[backwards]).add_(damping * mean)
        lower, info = torch.linalg.cholesky_ex(matrix)
        del matrix
        if int(info) == 0:
            break
        if damping * DAMPING_FACTOR > MAX_DAMPING:
            raise ContentError(
                f"the Hessian of expert {expert}, {list(hessian.shape)}, is not positive definite, even with "
                f"{damping:g} of its mean diagonal added",
                remedy="it must be a sum of x^T x over tokens: check that it was not overwritten",
            )
        damping = max(damping * DAMPING_FACTOR, MIN_RAISED_DAMPING)
    root = lower.flip(0, 1)
    del lower
    return GptqFactor(
        upper=invert_upper(root).to(torch.float32),
        root=root.to(torch.float32),
        order=order,
        damping=damping,
        num_dead_columns=num_dead,
    )


def invert_upper(matrix: Tensor) -> Tensor:
    """The inverse of an upper triangular matrix [K, K], by halves: [[A, B], [0, C]] -> [[A', -A' B C'], [0, C']].

    Two thirds of the operations of a triangular solve with the identity, and nearly all of them in products.
    """
    size = matrix.shape[0]
    if size <= SOLVED_SIZE:
        identity = torch.eye(size, dtype=matrix.dtype, device=matrix.device)
        return torch.linalg.solve_triangular(matrix, identity, upper=True)
    half = size // 2
    inverse = torch.zeros_like(matrix)
    inverse[:half, :half] = invert_upper(matrix[:half, :half])
    inverse[half:, half:] = invert_upper(matrix[half:, half:])
    inverse[:half, half:] = -(inverse[:half, :half] @ matrix[:half, half:]) @ inverse[half:, half:]
    return inverse
