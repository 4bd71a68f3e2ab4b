"""FP8 or BF16 rows to INT4 with whole-tensor torch operations: the path for CUDA, same bytes as int4_reference.py.

Nothing here is fused or contracted: torch rounds every elementwise operation by itself. Weights lie element-major,
[group / 8, 8, groups], so that every sum in the pinned order is a sum of contiguous rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.errors import NonFiniteError, ShapeError
from memopt.kernels.checks import NonFiniteWeightError, check_group, check_source
from memopt.kernels.device.tensor_checks import require_tensor
from memopt.kernels.float8_reference import stored_bits
from memopt.kernels.int4_reference import grouped_importance
from memopt.kernels.int4_spec import SCALE_GRID, BlockShape, Int4Rows, Int4Spec
from memopt.kernels.layout import (
    BITS_PER_BYTE,
    CODES_PER_WORD,
    INT4_BITS,
    INT4_CODE_MAX,
    INT4_CODE_MIN,
    INT4_CODE_OFFSET,
    INT4_HALF_SPAN,
)
from memopt.kernels.number_reference import bf16_bits, power_04, round_bf16

# Weights rounded at once. A step holds about eight float32 tensors of this size: 0.5 GiB.
WEIGHTS_A_STEP = 1 << 24


def _decode(weight: Tensor, block_scale: Tensor | None, block: BlockShape, first_row: int) -> Tensor:
    """float32 weights [r, C] of the rows from `first_row` of the chunk on."""
    if block_scale is None:
        return weight.view(torch.bfloat16).to(torch.float32)
    rows = torch.arange(first_row, first_row + weight.shape[0], device=weight.device) // block.rows
    columns = torch.arange(weight.shape[1], device=weight.device) // block.columns
    values = weight.view(torch.float8_e4m3fn).to(torch.float32)
    return values.mul_(block_scale[rows][:, columns])


def _sum_in_order(terms: Tensor) -> Tensor:
    """float32 sums [N] of terms [W, 8, N]: a tree within each eight, then the eights one after another."""
    pairs = terms[:, 0::2] + terms[:, 1::2]
    quads = pairs[:, 0::2] + pairs[:, 1::2]
    words = quads[:, 0] + quads[:, 1]
    total = words[0].clone()
    for word in words[1:]:
        total += word
    return total


def _error(
    groups: Tensor, rounded: Tensor, scale: Tensor, low: int, high: int, norm: str, importance: Tensor | None
) -> Tensor:
    difference = groups - rounded.clamp(low, high).mul_(scale)
    terms = difference * difference
    if norm == "2.4":
        terms.mul_(power_04(difference))
    if importance is not None:
        by_row = terms.view(*terms.shape[:2], -1, importance.shape[2])
        by_row.mul_(importance[:, :, None])
    return _sum_in_order(terms)


def _search(groups: Tensor, largest: Tensor, absmax: Tensor, spec: Int4Spec, importance: Tensor | None) -> Tensor:
    """The best scale [N] of the grid for groups [W, 8, N]; both signs share one rounding.

    `importance`: float32 [W, 8, G], of the G groups of each row.
    """
    one, half_span = torch.ones_like(largest), torch.full_like(largest, INT4_HALF_SPAN)
    low, high = INT4_CODE_MIN, INT4_CODE_MAX
    rounded = (groups * (one / absmax)).round_()
    best, scale = _error(groups, rounded, absmax, low, high, spec.error_norm, importance), absmax.clone()
    for factor in SCALE_GRID:
        candidate = round_bf16(largest * factor / half_span)
        torch.mul(groups, one / candidate, out=rounded).round_()
        error = _error(groups, rounded, candidate, low, high, spec.error_norm, importance)
        better = error < best
        best, scale = torch.where(better, error, best), torch.where(better, candidate, scale)
        if spec.scale_search == "mse-signed":
            error = _error(groups, rounded, candidate, -high, -low, spec.error_norm, importance)
            better = error < best
            best, scale = torch.where(better, error, best), torch.where(better, -candidate, scale)
    return scale


def _row_sums(group_sums: Tensor, rows: int, groups_a_row: int) -> Tensor:
    """float64 sums [K, rows] of K kinds of group sums [K, rows * G], groups added one after another."""
    sums = group_sums.view(group_sums.shape[0], rows, groups_a_row).to(torch.float64)
    columns = sums.permute(2, 0, 1).contiguous()
    total = torch.zeros_like(columns[0])
    for column in columns:
        total += column
    return total


def _element_major(values: Tensor, group: int) -> Tensor:
    """Groups [group / 8, 8, N] of rows [r, C], one group after another along N."""
    num_groups = values.numel() // group
    return values.view(num_groups, group).t().contiguous().view(group // CODES_PER_WORD, CODES_PER_WORD, num_groups)


def _scales(groups: Tensor, spec: Int4Spec, importance: Tensor | None) -> Tensor:
    """BF16 scales as float32 [N] of finite groups [W, 8, N]."""
    largest = groups.abs().amax(dim=(0, 1))
    # A tensor, not a number: CUDA divides by a number through its reciprocal, which rounds differently.
    absmax = round_bf16(largest / torch.full_like(largest, INT4_HALF_SPAN))
    scale = absmax if spec.scale_search == "absmax" else _search(groups, largest, absmax, spec, importance)
    return torch.where(absmax == 0, torch.ones_like(scale), scale)


def _round_rows(values: Tensor, group: int, spec: Int4Spec, importance: Tensor | None) -> Int4Rows[Tensor]:
    """Rounds finite float32 rows [r, C]."""
    rows, columns = values.shape
    groups = _element_major(values, group)
    scale = _scales(groups, spec, importance)
    rounded = (groups / scale).round_()
    codes = rounded.clamp(INT4_CODE_MIN, INT4_CODE_MAX)
    difference = groups - codes * scale
    sums = torch.stack((_sum_in_order(difference * difference), _sum_in_order(groups * groups)))
    sq_error, energy = _row_sums(sums, rows, columns // group)
    nibbles = codes.to(torch.int32) + INT4_CODE_OFFSET
    packed = torch.zeros(nibbles[:, 0].shape, dtype=torch.int32, device=values.device)
    for j in range(CODES_PER_WORD):
        packed |= nibbles[:, j] << (INT4_BITS * j)
    return Int4Rows(
        packed=packed.t().contiguous().reshape(-1).view(rows, columns // CODES_PER_WORD),
        scale_bits=bf16_bits(scale).view(rows, columns // group),
        sq_error=sq_error,
        energy=energy,
        max_error=difference.abs_().amax(dim=(0, 1)).view(rows, columns // group).amax(dim=1),
        num_clipped=(rounded != codes).sum(dim=(0, 1)).view(rows, columns // group).sum(dim=1),
    )


def quantize_int4(
    weight: Tensor,
    block_scale: Tensor | None,
    block: tuple[int, int] | None,
    spec: Int4Spec,
    importance: Tensor | None = None,
    *,
    weights_a_step: int = WEIGHTS_A_STEP,
) -> Int4Rows[Tensor]:
    """Rounds a chunk of rows to INT4 on the device that holds it; results stay there.

    Arguments, errors and bytes as for `int4_reference.quantize_int4`. `weights_a_step` bounds the working memory: about
    32 bytes each, and at least one row at a time.
    """
    stored_bits(weight[:0])
    scale_shape = None if block_scale is None else tuple(block_scale.shape)
    shape = check_source(tuple(weight.shape), weight.element_size() * BITS_PER_BYTE, scale_shape, block)
    group = check_group(weight.shape[1], spec)
    if block_scale is not None and block_scale.dtype != torch.float32:
        raise ShapeError(f"a block scale is {block_scale.dtype}, but float32 is needed", remedy="convert it first")
    rows, columns = weight.shape
    weighting = _weighting(importance, columns, group, spec)
    step = max(weights_a_step // columns, 1)
    parts = []
    for first in range(0, max(rows, 1), step):
        values = _decode(weight[first : first + step], block_scale, shape, first)
        finite = torch.isfinite(values)
        if not bool(finite.all()):
            place = first * columns + int((~finite).reshape(-1).to(torch.uint8).argmax())
            raise _non_finite(weight, block_scale, shape, place)
        parts.append(_round_rows(values, group, spec, weighting))
    if len(parts) == 1:
        return parts[0]
    names = ("packed", "scale_bits", "sq_error", "energy", "max_error", "num_clipped")
    return Int4Rows(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def search_int4_scale(
    values: Tensor, spec: Int4Spec, importance: Tensor | None = None, *, weights_a_step: int = WEIGHTS_A_STEP
) -> Tensor:
    """bfloat16 [R, G]: the scales that `quantize_int4` takes for finite float32 rows [R, C], on their device.

    `importance` and `weights_a_step` as there. Raises ShapeError for another dtype or shape, AlignmentError and
    UsageError as there, and NonFiniteError for a value that is NaN or infinite.
    """
    require_tensor("values", values, (None, None), torch.float32)
    rows, columns = values.shape
    group = check_group(columns, spec)
    weighting = _weighting(importance, columns, group, spec)
    finite = torch.isfinite(values)
    if not bool(finite.all()):
        row, column = divmod(int((~finite).reshape(-1).to(torch.uint8).argmax()), columns)
        raise NonFiniteError(f"the value at row {row}, column {column} is not a finite number")
    step = max(weights_a_step // columns, 1)
    scales = torch.empty(rows, columns // group, dtype=torch.bfloat16, device=values.device)
    for first in range(0, rows, step):
        found = _scales(_element_major(values[first : first + step], group), spec, weighting)
        scales[first : first + step] = bf16_bits(found).view(torch.bfloat16).view(-1, columns // group)
    return scales


def _weighting(importance: Tensor | None, columns: int, group: int, spec: Int4Spec) -> Tensor | None:
    """`importance` [C] as [group / 8, 8, G], None for None; errors as for `check_importance`."""
    grouped = grouped_importance(importance, columns, group, spec)
    if grouped is None:
        return None
    return grouped.t().contiguous().view(group // CODES_PER_WORD, CODES_PER_WORD, columns // group)


def _non_finite(weight: Tensor, block_scale: Tensor | None, block: BlockShape, place: int) -> NonFiniteWeightError:
    row, column = divmod(place, weight.shape[1])
    bits = int(stored_bits(weight[row, column].reshape(1)))
    scale = None if block_scale is None else float(block_scale[row // block.rows, column // block.columns])
    return NonFiniteWeightError(row, column, bits, scale)
