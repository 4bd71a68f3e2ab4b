"""GPTQ over a batch of experts: columns rounded one after another, each error passed on to the columns behind.

Frantar et al., arXiv 2210.17323, with fixed group scales. `gptq_reference.py` has it in twenty lines; here columns are
solved in blocks on the chip (one launch for all experts), and what a block leaves is one product with those behind.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memopt.errors import AlignmentError, ContentError, NonFiniteError, ShapeError, UsageError
from memopt.kernels.calibration.float32_matmul import ieee_float32_matmul
from memopt.kernels.calibration.gptq_block_cpu import gptq_block_cpu
from memopt.kernels.calibration.gptq_factor import GptqFactors, factorize_hessians
from memopt.kernels.calibration.gptq_options import GptqOptions, GptqResult
from memopt.kernels.device.tensor_checks import require_tensor
from memopt.kernels.layout import INT4_CODE_MAX, INT4_CODE_MIN


def gptq_solve(
    weight: Tensor,
    hessian: Tensor,
    scale: Tensor,
    options: GptqOptions | None = None,
    *,
    factors: GptqFactors | None = None,
) -> GptqResult:
    """INT4 codes of `weight` that keep the layer's output near, given its inputs' Hessian and fixed scales.

    `weight` float32 [E, R, K]; `hessian` float32 [E, K, K], symmetric, sums of x^T x with any positive factor (zeros
    for an expert without tokens: its codes are plain rounding); `scale` bfloat16 [E, R, G], one scale for K / G
    weights of a row, negative ones too. A code is clamp(round_half_even(w / scale), -8, 7), divided truly.
    Inputs are not changed. `factors`: those of `hessian` with these options (and with roots for `keep_better`), where
    the caller has them: scales may be chosen by them (`GptqFactors.importance`).
    Working memory: up to 20 bytes a weight, 8 bytes for each element of each Hessian, and 32 bytes for each element of
    one Hessian.
    Codes are the same from run to run on one device with one set of libraries; between devices they may differ where
    a corrected weight lies within float32 rounding of a tie.
    Raises ShapeError, AlignmentError (groups that do not fill a row), UsageError (options), NonFiniteError (naming the
    expert), ContentError (a zero scale, a Hessian that is not symmetric or not positive definite).
    """
    options = options or GptqOptions()
    _check(weight, hessian, scale, options)
    num_experts, num_rows, num_columns = weight.shape
    if weight.numel() == 0:
        return _nothing(weight, options)
    if factors is not None:
        _check_factors(factors, hessian, options)
    if factors is None:
        factors = factorize_hessians(hessian, options, with_roots=options.keep_better)
    order = factors.order
    steps = order[:, :, None].expand(num_experts, num_columns, num_rows)
    # Columns first and in their order of solving: a column of a block is then one run of memory.
    columns = weight.mT.gather(1, steps)
    scales = scale.to(torch.float32).mT.contiguous()
    groups = (order // (num_columns // scale.shape[2])).to(torch.int32)
    with ieee_float32_matmul():
        plain_codes, plain_loss = None, None
        if options.keep_better:
            plain_codes = _round_plain(columns, scales, groups)
            plain_loss = _loss(columns, plain_codes, scales, groups, factors.roots, options.block_columns)
        codes, loss = _solve(columns, factors.upper, scales, groups, options.block_columns)
    num_plain_rows = torch.zeros(num_experts, dtype=torch.int64, device=weight.device)
    if plain_codes is not None and plain_loss is not None:
        is_plain = plain_loss < loss
        codes = torch.where(is_plain[:, None], plain_codes, codes)
        loss = torch.minimum(loss, plain_loss)
        num_plain_rows = is_plain.sum(dim=1)
    in_place = torch.empty_like(codes).scatter_(1, steps, codes)
    return GptqResult(
        in_place.mT.contiguous(), loss, plain_loss, num_plain_rows, factors.damping, factors.num_dead_columns
    )


def _check(weight: Tensor, hessian: Tensor, scale: Tensor, options: GptqOptions) -> None:
    require_tensor("weight", weight, (None, None, None), torch.float32)
    num_experts, num_rows, num_columns = weight.shape
    require_tensor("hessian", hessian, (num_experts, num_columns, num_columns), torch.float32, like=weight)
    require_tensor("scale", scale, (num_experts, num_rows, None), torch.bfloat16, like=weight)
    num_groups = scale.shape[2]
    if num_columns and (num_groups == 0 or num_columns % num_groups):
        raise AlignmentError(
            f"{num_groups} scales a row do not divide its {num_columns} weights",
            remedy="scale must be [E, R, K / group size]",
        )
    if not (0.0 <= options.damping < float("inf")) or options.block_columns < 1:
        raise UsageError(
            f"damping is {options.damping} and block_columns {options.block_columns}",
            remedy="damping must be finite and not negative, a block at least one column",
        )
    for name, tensor in (("weight", weight), ("hessian", hessian), ("scale", scale)):
        is_finite = torch.isfinite(tensor).flatten(1).all(dim=1)
        if not bool(is_finite.all()):
            expert = int((~is_finite).to(torch.uint8).argmax())
            raise NonFiniteError(f"the {name} of expert {expert} is NaN or infinite somewhere", tensor=name)
    is_zero = (scale == 0).flatten(1).any(dim=1)
    if bool(is_zero.any()):
        raise ContentError(
            f"a scale of expert {int(is_zero.to(torch.uint8).argmax())} is zero",
            tensor="scale",
            remedy="a group of zeros has scale 1 (int4_reference.search_scale)",
        )


def _check_factors(factors: GptqFactors, hessian: Tensor, options: GptqOptions) -> None:
    if factors.upper.shape != hessian.shape or (options.keep_better and len(factors.roots) != hessian.shape[0]):
        raise ShapeError(
            f"the factors are {list(factors.upper.shape)} with {len(factors.roots)} roots, but Hessians "
            f"{list(hessian.shape)} were given",
            remedy="factorize these Hessians, with roots for keep_better",
        )


def _nothing(weight: Tensor, options: GptqOptions) -> GptqResult:
    """The result of no weights."""
    num_experts = weight.shape[0]
    loss = torch.zeros(weight.shape[:2], device=weight.device)
    return GptqResult(
        codes=weight.to(torch.int8),
        loss=loss,
        plain_loss=loss.clone() if options.keep_better else None,
        num_plain_rows=torch.zeros(num_experts, dtype=torch.int64, device=weight.device),
        damping=torch.full((num_experts,), options.damping, dtype=torch.float64),
        num_dead_columns=torch.zeros(num_experts, dtype=torch.int64),
    )


def _solve(columns: Tensor, upper: Tensor, scales: Tensor, groups: Tensor, block_columns: int) -> tuple[Tensor, Tensor]:
    """Codes int8 [E, K, R] and losses float32 [E, R] of `columns` [E, K, R], which are overwritten."""
    solve_block = gptq_block_cpu
    if columns.is_cuda:
        from memopt.kernels.calibration.gptq_block_triton import gptq_block_triton

        solve_block = gptq_block_triton
    num_experts, num_columns, num_rows = columns.shape
    codes = torch.empty(columns.shape, dtype=torch.int8, device=columns.device)
    loss = torch.zeros(num_experts, num_rows, device=columns.device)
    for first in range(0, num_columns, block_columns):
        end = min(first + block_columns, num_columns)
        block = slice(first, end)
        errors = torch.empty(num_experts, end - first, num_rows, device=columns.device)
        factor = upper[:, block, block]
        solve_block(columns[:, block], factor, scales, groups[:, block], codes[:, block], errors)
        # The errors are the loss: with (w - q) = e U and H = U^-1 U^-T, (w - q) H (w - q)^T = e e^T.
        loss += errors.square().sum(dim=1)
        if end < num_columns:
            columns[:, end:].baddbmm_(upper[:, block, end:].mT, errors, alpha=-1)
    return codes, loss


def _column_scales(scales: Tensor, groups: Tensor) -> Tensor:
    """The scale of each weight [E, K, R]."""
    steps = groups.to(torch.int64)[:, :, None].expand(*groups.shape, scales.shape[2])
    return scales.gather(1, steps)


def _round_plain(columns: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    ratio = columns / _column_scales(scales, groups)
    return ratio.round_().clamp_(INT4_CODE_MIN, INT4_CODE_MAX).to(torch.int8)


def _loss(
    columns: Tensor, codes: Tensor, scales: Tensor, groups: Tensor, roots: Sequence[Tensor], block_columns: int
) -> Tensor:
    """(w - q) H (w - q)^T [E, R] as |(w - q) M|**2, block by block of the upper triangular M."""
    difference = columns - codes * _column_scales(scales, groups)
    loss = torch.zeros(difference.shape[0], difference.shape[2], device=columns.device)
    for expert, root in enumerate(roots):
        for first in range(0, difference.shape[1], block_columns):
            end = first + block_columns
            product = root[:end, first:end].T @ difference[expert, :end]
            loss[expert] += product.square_().sum(dim=0)
    return loss
