"""One expert, rounded with the statistics of its inputs, beside what plain rounding gives.

Three candidates, each with its own scales: plain rounding (the recipe's scale search, no data), rounding under scales
whose search is weighted by the inputs, and for gptq the solve. A row takes the method's codes unless its plain ones
serve the inputs better.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from memopt.compressor.calibrate.module_statistics import ModuleStatistics, shrink_statistics
from memopt.compressor.calibrate.rounding_report import ExpertReport, RoundingMethod
from memopt.compressor.fallback_reason import FallbackReason
from memopt.compressor.recipe import DEFAULT_DAMPING, Int4Format
from memopt.errors import UsageError
from memopt.kernels.calibration.float32_matmul import ieee_float32_matmul
from memopt.kernels.calibration.gptq import gptq_solve
from memopt.kernels.calibration.gptq_factor import (
    NotPositiveDefiniteError,
    damp_hessian,
    factorize_hessians,
    scale_to_one,
)
from memopt.kernels.calibration.gptq_options import GptqOptions
from memopt.kernels.calibration.refine import refine_codes
from memopt.kernels.calibration.round_to_scale import diagonal_loss, hessian_loss, round_to_scale, search_scale
from memopt.kernels.int4_spec import Int4Spec


@dataclass(frozen=True)
class RoundingOptions:
    """What a recipe does not say.

    `min_tokens`: experts with fewer are rounded plainly, and counted. `shrinkage_tokens`: see `shrink_statistics`.
    `num_sweeps`: sweeps of `refine_codes` after the solve (gptq): each costs as much as two solves.
    """

    min_tokens: int = 1
    shrinkage_tokens: float = 0.0
    num_sweeps: int = 3


@dataclass(frozen=True)
class RoundedExpert:
    """`codes`: int8 [R, K]. `scale`: bfloat16 [R, G]."""

    codes: Tensor
    scale: Tensor
    report: ExpertReport


@dataclass(frozen=True)
class _Candidate:
    """Codes int8 [R, K] under `scale` bfloat16 [R, G], and each row's error float64 [R]."""

    method: RoundingMethod
    codes: Tensor
    scale: Tensor
    error: Tensor


def round_expert(
    weight: Tensor,
    statistics: ModuleStatistics,
    form: Int4Format,
    options: RoundingOptions,
    *,
    layer: ModuleStatistics | None = None,
    expert: int = 0,
) -> RoundedExpert:
    """Rounds `weight` float32 [R, K] with its own `statistics` (E = 1); arguments and errors as `round_calibrated`."""
    shrunk = shrink_statistics(statistics, options.shrinkage_tokens, layer)
    if form.method == "weighted":
        # Then its diagonal is the whole Hessian: errors and scales follow from it alone.
        shrunk = replace(shrunk, hessian=None)
    spec = Int4Spec(form.weights_per_scale, form.scale, form.norm)
    with ieee_float32_matmul():
        plain = _rounded("plain", weight, search_scale(weight, spec), shrunk)
        num_tokens, reason = int(statistics.num_tokens), None
        weighted = solved = None
        damping = None
        if num_tokens < options.min_tokens:
            reason = FallbackReason.FEW_TOKENS
        elif not bool((shrunk.second_moment > 0).any()):
            reason = FallbackReason.NO_SIGNAL
        else:
            importance = column_importance(shrunk.second_moment, form.damping or 0.0)
            weighted = _rounded("weighted", weight, search_scale(weight, spec, importance[0]), shrunk)
            if form.method == "gptq":
                try:
                    solved, damping = _solved(weight, shrunk, spec, form, options)
                except NotPositiveDefiniteError:
                    reason = FallbackReason.SINGULAR
        best = solved or weighted
        kept, num_plain_rows = (plain, 0) if best is None else _better_rows(best, plain)
    if best is not None and num_plain_rows == weight.shape[0]:
        kept, reason = plain, reason or FallbackReason.NO_GAIN
    report = ExpertReport(
        expert=expert,
        num_tokens=num_tokens,
        method=kept.method,
        damping=damping,
        num_dead_columns=int((shrunk.second_moment == 0).sum()),
        energy=float(_energy(weight, shrunk)),
        plain_error=float(plain.error.sum()),
        weighted_error=None if weighted is None else float(weighted.error.sum()),
        error=float(kept.error.sum()),
        num_rows=weight.shape[0],
        num_plain_rows=num_plain_rows,
        fallback=reason,
    )
    return RoundedExpert(kept.codes, kept.scale, report)


def column_importance(second_moment: Tensor, damping: float) -> Tensor:
    """float32 [E, K], largest 1, of second moments float32 [E, K] of which some are not zero.

    A column counts its second moment and `damping` of the mean of the live ones, as in a damped Hessian; a column that
    no token reached counts as much as the mean. So no column is free: calibration data does not show every input.
    Raises UsageError for second moments that are all zero, or negative.
    """
    moments = second_moment.to(torch.float64)
    num_live = (moments > 0).sum(dim=1, keepdim=True)
    if bool((num_live == 0).any()) or bool((moments < 0).any()):
        raise UsageError("second moments are negative, or all zero", remedy="round an expert without inputs plainly")
    mean = moments.sum(dim=1, keepdim=True) / num_live
    return scale_to_one(torch.where(moments == 0, mean, moments) + damping * mean)


def _solved(
    weight: Tensor, statistics: ModuleStatistics, spec: Int4Spec, form: Int4Format, options: RoundingOptions
) -> tuple[_Candidate, float]:
    """The solve's codes and the damping that it took. NotPositiveDefiniteError where none is enough."""
    hessian = _hessian(statistics)
    gptq = GptqOptions(damping=form.damping or DEFAULT_DAMPING, act_order=True, keep_better=False)
    factors = factorize_hessians(hessian[None], gptq, with_roots=False)
    scale = search_scale(weight, spec, factors.importance[0])[None]
    codes = gptq_solve(weight[None], hessian[None], scale, gptq, factors=factors).codes
    if options.num_sweeps:
        damped = damp_hessian(hessian[None], factors.damping)
        refined = refine_codes(weight[None], damped, codes, scale, num_sweeps=options.num_sweeps)
        codes, scale = refined.codes, refined.scale
    error = hessian_loss(weight, codes[0], scale[0], hessian)
    return _Candidate("gptq", codes[0], scale[0], error), float(factors.damping)


def _rounded(method: RoundingMethod, weight: Tensor, scale: Tensor, statistics: ModuleStatistics) -> _Candidate:
    codes = round_to_scale(weight, scale)
    if statistics.hessian is None:
        error = diagonal_loss(weight, codes, scale, statistics.second_moment[0])
    else:
        error = hessian_loss(weight, codes, scale, statistics.hessian[0])
    return _Candidate(method, codes, scale, error)


def _better_rows(best: _Candidate, plain: _Candidate) -> tuple[_Candidate, int]:
    """`best`, with plain codes and scales in the rows that they serve better; how many those are."""
    is_plain = plain.error < best.error
    kept = _Candidate(
        best.method,
        torch.where(is_plain[:, None], plain.codes, best.codes),
        torch.where(is_plain[:, None], plain.scale, best.scale),
        torch.where(is_plain, plain.error, best.error),
    )
    return kept, int(is_plain.sum())


def _energy(weight: Tensor, statistics: ModuleStatistics) -> Tensor:
    """The output's squared sum a token: the error of codes that are all zero."""
    nothing = torch.zeros_like(weight, dtype=torch.int8)
    scale = torch.ones(weight.shape[0], 1, dtype=torch.bfloat16, device=weight.device)
    if statistics.hessian is None:
        return diagonal_loss(weight, nothing, scale, statistics.second_moment[0]).sum()
    return hessian_loss(weight, nothing, scale, statistics.hessian[0]).sum()


def _hessian(statistics: ModuleStatistics) -> Tensor:
    if statistics.hessian is None:
        raise UsageError("these statistics have no Hessian", remedy="collect with_hessian")
    return statistics.hessian[0]
