"""FP8 or BF16 rows to INT4: plain torch, written to be read. It defines the bytes that cpu.py and int4_device.py give.

Everything is IEEE float32, each operation rounded by itself (no fused multiply-add, no flush to zero).
"""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.errors import ShapeError
from memopt.kernels.checks import check_group, check_importance, check_packed
from memopt.kernels.float8_reference import first_non_finite, weight_values
from memopt.kernels.int4_spec import SCALE_GRID, Int4Rows, Int4Spec
from memopt.kernels.layout import (
    CODES_PER_WORD,
    INT4_BITS,
    INT4_CODE_MASK,
    INT4_CODE_MAX,
    INT4_CODE_MIN,
    INT4_CODE_OFFSET,
    INT4_HALF_SPAN,
)
from memopt.kernels.number_reference import bf16_bits, bf16_value, power_04, round_bf16


def pack_int4(codes: Tensor) -> Tensor:
    """int32 words [R, C / 8] of codes [R, C] in -8..7 (any integer dtype): code + 8, element j in bits 4j..4j+3.

    Raises ShapeError when C is not a multiple of 8. Source: compressed-tensors, "pack-quantized".
    """
    if codes.ndim != 2 or codes.shape[1] % CODES_PER_WORD:
        raise ShapeError(f"codes {list(codes.shape)} need 2 dimensions and columns in multiples of {CODES_PER_WORD}")
    words_a_row = codes.shape[1] // CODES_PER_WORD
    nibbles = (codes.to(torch.int32) + INT4_CODE_OFFSET).view(codes.shape[0], words_a_row, CODES_PER_WORD)
    words = torch.zeros(nibbles.shape[:2], dtype=torch.int32, device=codes.device)
    for j in range(CODES_PER_WORD):
        words |= nibbles[:, :, j] << (INT4_BITS * j)
    return words


def unpack_int4(packed: Tensor) -> Tensor:
    """int8 codes [R, C] in -8..7 of int32 words [R, C / 8]. Raises ShapeError for another dtype or shape."""
    if packed.ndim != 2 or packed.dtype != torch.int32:
        raise ShapeError(f"packed codes are {packed.dtype} {list(packed.shape)}, but int32 [R, C / 8] is needed")
    nibbles = [(packed >> (INT4_BITS * j)) & INT4_CODE_MASK for j in range(CODES_PER_WORD)]
    return (torch.stack(nibbles, dim=2).flatten(1) - INT4_CODE_OFFSET).to(torch.int8)


def sum_in_order(terms: Tensor) -> Tensor:
    """float32 sums [...] of terms [..., group]: a tree within each eight, then the eights one after another."""
    eights = terms.reshape(*terms.shape[:-1], terms.shape[-1] // CODES_PER_WORD, CODES_PER_WORD)
    e0, e1, e2, e3, e4, e5, e6, e7 = eights.unbind(-1)
    words = ((e0 + e1) + (e2 + e3)) + ((e4 + e5) + (e6 + e7))
    total: Tensor = words[..., 0]
    for k in range(1, words.shape[-1]):
        total = total + words[..., k]
    return total


def scale_error(groups: Tensor, scale: Tensor, negative: bool, norm: str, importance: Tensor | None = None) -> Tensor:
    """Error sums [R, G] that the search compares: sum |w - code * scale| ** p over groups [R, G, group].

    With `importance` float32 [G, group] each square is multiplied by its column's, which is rounded once more.
    `scale` [R, G] is not negative; `negative` asks for the error of -scale, whose codes are those of +scale mirrored.
    Codes come from a product with the reciprocal here, not from the division that the final codes use: near a tie
    the two may differ, where either code costs nearly the same.
    """
    rounded = torch.round(groups * (torch.ones_like(scale) / scale)[..., None])
    low, high = (-INT4_CODE_MAX, -INT4_CODE_MIN) if negative else (INT4_CODE_MIN, INT4_CODE_MAX)
    difference = groups - rounded.clamp(low, high) * scale[..., None]
    terms = difference * difference
    if norm != "2":
        terms = terms * power_04(difference)
    return sum_in_order(terms if importance is None else terms * importance)


def search_scale(groups: Tensor, spec: Int4Spec, importance: Tensor | None = None) -> Tensor:
    """BF16 scales (as float32) [R, G] of groups [R, G, group] by the rule of `spec`; 1 where absmax gives zero.

    `importance`: float32 [G, group], the weight of each column's squared error.
    """
    largest = groups.abs().amax(dim=-1)
    half_span = torch.full_like(largest, INT4_HALF_SPAN)  # a tensor: CUDA divides by a number through its reciprocal
    absmax = round_bf16(largest / half_span)
    scale = absmax.clone()
    if spec.scale_search != "absmax":
        best = scale_error(groups, absmax, False, spec.error_norm, importance)
        for factor in SCALE_GRID:
            candidate = round_bf16(largest * factor / half_span)
            for negative in (False, True) if spec.scale_search == "mse-signed" else (False,):
                error = scale_error(groups, candidate, negative, spec.error_norm, importance)
                better = error < best
                best = torch.where(better, error, best)
                scale = torch.where(better, -candidate if negative else candidate, scale)
    return torch.where(absmax == 0, torch.ones_like(scale), scale)


def grouped_importance(importance: Tensor | None, columns: int, group: int, spec: Int4Spec) -> Tensor | None:
    """`importance` [C] as [G, group], or None for None; errors as for `check_importance`."""
    if importance is None:
        return None
    is_positive = bool((torch.isfinite(importance) & (importance > 0)).all())
    check_importance(tuple(importance.shape), str(importance.dtype), is_positive, columns, spec)
    return importance.view(columns // group, group)


def quantize_int4(
    weight: Tensor,
    block_scale: Tensor | None,
    block: tuple[int, int] | None,
    spec: Int4Spec,
    importance: Tensor | None = None,
) -> Int4Rows[Tensor]:
    """Rounds a chunk of rows to INT4.

    `weight` [R, C]: uint8 or float8_e4m3fn with `block_scale` float32 [ceil(R / rows), ceil(C / columns)] of `block`
    (rows, columns); or uint16, int16 or bfloat16 with neither. A chunk starts at a multiple of the block's rows.
    Codes are clamp(round_half_even(w / scale), -8, 7) against the stored BF16 scale, divided truly.
    `importance`: float32 [C], positive: multiplies each column's squared error in the scale search (norm "2" only),
    which is then sum_j importance_j * (w_j - scale * q_j) ** 2. The error figures are not weighted.
    Raises AlignmentError when groups do not fill a row, ShapeError or UsageError for input that does not fit, and
    NonFiniteWeightError for the first weight that is NaN or infinite once scaled.
    """
    values = weight_values(weight, block_scale, block)
    rows, columns = values.shape
    group = check_group(columns, spec)
    weighting = grouped_importance(importance, columns, group, spec)
    error = first_non_finite(values, weight, block_scale, block)
    if error is not None:
        raise error
    groups = values.view(rows, columns // group, group)
    scale = search_scale(groups, spec, weighting)
    rounded = torch.round(groups / scale[..., None])
    codes = rounded.clamp(INT4_CODE_MIN, INT4_CODE_MAX)
    difference = groups - codes * scale[..., None]
    sq_error = torch.zeros(rows, dtype=torch.float64, device=values.device)
    energy = torch.zeros_like(sq_error)
    group_sq, group_energy = sum_in_order(difference * difference), sum_in_order(groups * groups)
    for g in range(columns // group):
        sq_error += group_sq[:, g]
        energy += group_energy[:, g]
    return Int4Rows(
        packed=pack_int4(codes.view(rows, columns)),
        scale_bits=bf16_bits(scale),
        sq_error=sq_error,
        energy=energy,
        max_error=difference.abs().amax(dim=(1, 2)),
        num_clipped=(rounded != codes).sum(dim=(1, 2)),
    )


def dequantize_int4(packed: Tensor, scale_bits: Tensor, group_size: int | None) -> Tensor:
    """bfloat16 weights [R, C] of packed codes: code * scale, rounded once to nearest, ties to even.

    `packed` int32 [R, C / 8]; `scale_bits` int16 (or bfloat16) [R, G]; `group_size` weights a scale, None: the row.
    Raises ShapeError when they do not fit.
    """
    group = check_packed(tuple(packed.shape), tuple(scale_bits.shape), group_size)
    codes = unpack_int4(packed).to(torch.float32).reshape(packed.shape[0], scale_bits.shape[1], group)
    values = codes * bf16_value(scale_bits.view(torch.int16))[..., None]
    return bf16_bits(values).view(torch.bfloat16).flatten(1)
