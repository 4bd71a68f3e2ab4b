"""Refines INT4 codes and scales under a Hessian: sweeps over the groups, each group's best while the others stay.

GPTQ decides a column once, before it knows what the columns behind it become, and under a scale that was chosen before
the solve. A sweep revisits both: the group's scale by least squares, then its codes by coordinate descent (cyclic
descent on codes: Behdin et al., QuantEase, arXiv 2309.01885). No step raises the loss, so neither does a sweep.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from memopt.errors import AlignmentError, UsageError
from memopt.kernels.calibration.descent_block_cpu import descend_block_cpu
from memopt.kernels.calibration.float32_matmul import ieee_float32_matmul
from memopt.kernels.device.tensor_checks import require_tensor
from memopt.kernels.layout import GPTQ_BLOCK_COLUMNS
from memopt.kernels.number_reference import bf16_bits


@dataclass(frozen=True)
class RefinedCodes:
    """`codes`: int8 [E, R, K], -8..7. `scale`: bfloat16 [E, R, G], never zero."""

    codes: Tensor
    scale: Tensor


def refine_codes(weight: Tensor, hessian: Tensor, codes: Tensor, scale: Tensor, *, num_sweeps: int) -> RefinedCodes:
    """Codes and scales near those given, with a loss (w - q) H (w - q)^T that is not higher in any row.

    `weight` float32 [E, R, K]; `hessian` float32 [E, K, K], symmetric, positive on its diagonal (damp it first: see
    `damp_hessian`); `codes` int8 [E, R, K]; `scale` bfloat16 [E, R, G], of K / G weights each, not zero. Inputs are
    not changed. A sweep costs 2 R K^2 operations an expert. Working memory: 12 bytes a weight.
    A column that stands alone in the Hessian (a dead one, damped) ends rounded to nearest under its final scale.
    The same from run to run on one device with one set of libraries. Raises ShapeError, AlignmentError, UsageError.
    """
    _check(weight, hessian, codes, scale, num_sweeps)
    num_columns, num_groups = weight.shape[2], scale.shape[2]
    new_codes = codes.mT.contiguous()
    scales = scale.to(torch.float32).mT.contiguous()
    if weight.numel() == 0 or num_sweeps == 0:
        return RefinedCodes(codes.clone(), scale.clone())
    group = num_columns // num_groups
    with ieee_float32_matmul():
        values = new_codes * scales.repeat_interleave(group, dim=1)
        gradient = hessian @ (weight.mT - values)
        del values
        for _ in range(num_sweeps):
            for index in range(num_groups):
                _sweep_group(gradient, hessian, new_codes, scales, index, group)
    return RefinedCodes(new_codes.mT.contiguous(), bf16_bits(scales).view(torch.bfloat16).mT.contiguous())


def _check(weight: Tensor, hessian: Tensor, codes: Tensor, scale: Tensor, num_sweeps: int) -> None:
    require_tensor("weight", weight, (None, None, None), torch.float32)
    num_experts, num_rows, num_columns = weight.shape
    require_tensor("hessian", hessian, (num_experts, num_columns, num_columns), torch.float32, like=weight)
    require_tensor("codes", codes, (num_experts, num_rows, num_columns), torch.int8, like=weight)
    require_tensor("scale", scale, (num_experts, num_rows, None), torch.bfloat16, like=weight)
    if num_columns and (scale.shape[2] == 0 or num_columns % scale.shape[2]):
        raise AlignmentError(
            f"{scale.shape[2]} scales a row do not divide its {num_columns} weights",
            remedy="scale must be [E, R, K / group size]",
        )
    if num_sweeps < 0:
        raise UsageError(f"num_sweeps is {num_sweeps}", remedy="use 0 or more")


def _sweep_group(gradient: Tensor, hessian: Tensor, codes: Tensor, scales: Tensor, index: int, group: int) -> None:
    """One group: its scale, then its codes. All but `hessian` lie transposed, [E, K or G, R], and change in place."""
    columns = slice(index * group, (index + 1) * group)
    of_group, rows = codes[:, columns], hessian[:, columns]
    old = of_group * scales[:, index, None]
    local = gradient[:, columns].clone()
    block = rows[:, :, columns]
    change = _scale_change(local, block, of_group, scales[:, index])
    scales[:, index] += change
    local.baddbmm_(block, of_group * change[:, None], alpha=-1)
    descend = _descent(codes)
    for first in range(0, group, GPTQ_BLOCK_COLUMNS):
        part = slice(first, min(first + GPTQ_BLOCK_COLUMNS, group))
        before = of_group[:, part].to(torch.int16)
        descend(local[:, part], block[:, part, part].contiguous(), scales[:, index].contiguous(), of_group[:, part])
        if part.stop < group:
            moved = (of_group[:, part] - before) * scales[:, index, None]
            local[:, part.stop :].baddbmm_(block[:, part.stop :, part], moved, alpha=-1)
    gradient.baddbmm_(rows.mT, of_group * scales[:, index, None] - old, alpha=-1)


def _scale_change(gradient: Tensor, block: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """What to add to `scale` [E, R] to get the BF16 number next to the least-squares scale; 0 where that gains nothing.

    With codes c fixed the loss is lowest at s + (c P) / (c H c^T), for the group's gradient P and its part of H.
    """
    values = codes.to(torch.float32)
    curvature = ((block @ values) * values).sum(dim=1)
    slope = (gradient * values).sum(dim=1)
    wanted = scale + slope / curvature
    is_usable = torch.isfinite(wanted) & (curvature > 0)
    wanted = torch.where(is_usable, wanted, scale)
    rounded = bf16_bits(wanted).view(torch.bfloat16).to(torch.float32)
    change = torch.where(torch.isfinite(rounded) & (rounded != 0), rounded - scale, torch.zeros_like(scale))
    gain = 2 * change * slope - change.square() * curvature
    return torch.where(gain > 0, change, torch.zeros_like(change))


def _descent(codes: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    if codes.is_cuda:
        from memopt.kernels.calibration.descent_block_triton import descend_block_triton

        return descend_block_triton
    return descend_block_cpu
