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


class NotPositiveDefiniteError(ContentError):
    """A Hessian that even MAX_DAMPING does not make positive definite."""


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
    nothing), and NotPositiveDefiniteError, one of these, when even MAX_DAMPING does not make it positive definite.
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
            raise NotPositiveDefiniteError(
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


@dataclass(frozen=True)
class GptqFactors:
    """Factors of E Hessians [E, K, K], stacked: `upper` float32 [E, K, K], `order` int64 [E, K].

    `roots`: one float32 [K, K] an expert, where they were asked for. `damping` float64 [E] and `num_dead_columns`
    int64 [E] lie on the CPU. Fields as in `GptqFactor`.
    """

    upper: Tensor
    order: Tensor
    roots: tuple[Tensor, ...]
    damping: Tensor
    num_dead_columns: Tensor

    @property
    def importance(self) -> Tensor:
        """float32 [E, K], largest 1: what a column's squared rounding error costs in a solve, in the weight's order.

        With (w - q) = e U the loss is e e^T, and e_j = (v_j - q_j) / U_jj for the corrected weight v_j that is rounded
        at column j's turn: so its squared error counts 1 / U_jj**2, the variance that the columns behind it leave.
        """
        # In float64: the square of a float32 may leave its range.
        cost = self.upper.diagonal(dim1=1, dim2=2).to(torch.float64).square().reciprocal()
        in_place = torch.empty_like(cost).scatter_(1, self.order, cost)
        return scale_to_one(in_place)


def scale_to_one(importance: Tensor) -> Tensor:
    """float32 [E, K] of positive float64 [E, K]: the largest of each expert is 1, none is below the normal numbers."""
    largest = importance.amax(dim=1, keepdim=True)
    return (importance / largest).to(torch.float32).clamp(min=torch.finfo(torch.float32).tiny)


def factorize_hessians(hessian: Tensor, options: GptqOptions, *, with_roots: bool) -> GptqFactors:
    """`factorize_hessian` of each of `hessian` [E, K, K]; errors as there."""
    num_experts, num_columns, _ = hessian.shape
    order = torch.empty(num_experts, num_columns, dtype=torch.int64, device=hessian.device)
    upper = torch.empty_like(hessian)
    roots: list[Tensor] = []
    damping = torch.empty(num_experts, dtype=torch.float64)
    num_dead = torch.empty(num_experts, dtype=torch.int64)
    for e in range(num_experts):
        factor = factorize_hessian(hessian[e], options, expert=e)
        order[e], upper[e] = factor.order, factor.upper
        damping[e], num_dead[e] = factor.damping, factor.num_dead_columns
        if with_roots:
            roots.append(factor.root)
    return GptqFactors(upper, order, tuple(roots), damping, num_dead)


def damp_hessian(hessian: Tensor, damping: Tensor) -> Tensor:
    """float32 [E, K, K]: what `factorize_hessian` factorizes, in the weight's order.

    `damping` (float64 [E]) of the mean live diagonal is added to the diagonal, and the mean itself to dead columns.
    """
    diagonal = hessian.diagonal(dim1=1, dim2=2).to(torch.float64)
    is_dead = diagonal == 0
    num_live = (~is_dead).sum(dim=1)
    mean = torch.where(num_live > 0, diagonal.sum(dim=1) / num_live.clamp(min=1), 1.0)
    damped = hessian.clone()
    added = (is_dead + damping.to(hessian.device)[:, None]) * mean[:, None]
    damped.diagonal(dim1=1, dim2=2).copy_(diagonal + added)
    return damped


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
