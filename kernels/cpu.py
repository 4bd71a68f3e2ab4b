"""FP8 or BF16 rows to INT4 on the CPU with numba: the production path without a GPU.

Same signatures on numpy arrays, and the same bytes, as int4_reference.py. Every call runs on the calling thread and
releases the GIL, so that callers run several at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from memopt.errors import NonFiniteError, ShapeError
from memopt.kernels.checks import (
    NonFiniteWeightError,
    check_group,
    check_importance,
    check_packed,
    check_source,
    segment_length,
)
from memopt.kernels.cpu_entry import (
    expand_fp8_entry,
    expand_int4_entry,
    quantize_entry,
    scaled_bits_entry,
    search_entry,
)
from memopt.kernels.cpu_tile import WORD_TYPE
from memopt.kernels.int4_spec import SCALE_GRID, BlockShape, Int4Rows, Int4Spec
from memopt.kernels.layout import BF16_INFINITY_BITS, BF16_SHIFT, BITS_PER_BYTE, CODES_PER_WORD, F32_INFINITY_BITS


def quantize_int4(
    weight: npt.NDArray[np.uint8] | npt.NDArray[np.uint16],
    block_scale: npt.NDArray[np.float32] | None,
    block: tuple[int, int] | None,
    spec: Int4Spec,
    importance: npt.NDArray[np.float32] | None = None,
) -> Int4Rows[npt.NDArray[Any]]:
    """Rounds a chunk of rows to INT4.

    `weight` [R, C]: uint8 e4m3fn bits with `block_scale` float32 [ceil(R / rows), ceil(C / columns)] of `block` (rows,
    columns), or uint16 BF16 bits with neither. A chunk starts at a multiple of the block's rows. `importance`: float32
    [C], positive; weighs each column's squared error in the scale search (error norm "2" only).
    Raises AlignmentError when groups do not fill a row, ShapeError or UsageError for input that does not fit, and
    NonFiniteWeightError for the first weight that is NaN or infinite once scaled. The rule: int4_reference.py.
    """
    shape, scales = _check(weight, block_scale, block)
    rows, columns = weight.shape
    group = check_group(columns, spec)
    groups_a_row = columns // group
    column_importance = _importance(importance, columns, spec)
    packed = np.empty((rows, columns // CODES_PER_WORD), np.int32)
    scale_bits = np.empty((rows, groups_a_row), np.uint16)
    sq_error = np.empty(rows, np.float64)
    energy = np.empty(rows, np.float64)
    max_error = np.empty(rows, np.float32)
    clipped = np.empty(rows, np.int64)
    grid = SCALE_GRID if spec.scale_search != "absmax" else ()
    finite = quantize_entry()(
        _as_words(weight), np.dtype(WORD_TYPE).itemsize // weight.itemsize, scales, shape.rows, shape.columns,
        segment_length(group, columns, shape), group, groups_a_row, np.array(grid, np.float32),
        spec.scale_search == "mse-signed", spec.error_norm == "2.4", column_importance,
        packed.reshape(-1).view(np.uint32), scale_bits.reshape(-1), sq_error, energy, max_error, clipped,
    )  # fmt: skip
    if not finite:
        raise _first_non_finite(weight, block_scale, shape)
    return Int4Rows(packed, scale_bits, sq_error, energy, max_error, clipped)


def search_int4_scale(
    values: npt.NDArray[np.float32], spec: Int4Spec, importance: npt.NDArray[np.float32] | None = None
) -> npt.NDArray[np.uint16]:
    """BF16 bits uint16 [R, G] of the scales that `quantize_int4` takes for finite float32 rows [R, C].

    `importance` as there. Raises ShapeError for another dtype or shape, AlignmentError and UsageError as there, and
    NonFiniteError for a value that is NaN or infinite.
    """
    if values.dtype != np.float32 or values.ndim != 2:
        raise ShapeError(f"values are {values.dtype} {list(values.shape)}, but float32 [rows, columns] is needed")
    rows, columns = values.shape
    group = check_group(columns, spec)
    column_importance = _importance(importance, columns, spec)
    scale_bits = np.empty((rows, columns // group), np.uint16)
    grid = SCALE_GRID if spec.scale_search != "absmax" else ()
    finite = search_entry()(
        _frozen(values).reshape(-1), group, columns // group, np.array(grid, np.float32),
        spec.scale_search == "mse-signed", spec.error_norm == "2.4", column_importance, scale_bits.reshape(-1),
    )  # fmt: skip
    if not finite:
        row, column = divmod(int((~np.isfinite(values)).argmax()), columns)
        raise NonFiniteError(f"the value at row {row}, column {column} is not a finite number")
    return scale_bits


def _importance(importance: npt.NDArray[Any] | None, columns: int, spec: Int4Spec) -> npt.NDArray[np.float32]:
    """`importance` checked and frozen; an empty array for None."""
    if importance is None:
        return _frozen(np.empty(0, np.float32))
    is_positive = bool((np.isfinite(importance) & (importance > 0)).all())
    check_importance(importance.shape, str(importance.dtype), is_positive, columns, spec)
    return _frozen(importance)


def dequantize_float8_bf16(
    weight: npt.NDArray[np.uint8], block_scale: npt.NDArray[np.float32], block: tuple[int, int]
) -> npt.NDArray[np.uint16]:
    """BF16 bits uint16 [R, C] of FP8 rows: float32(e4m3) * float32(scale), then rounded to BF16, ties to even.

    `weight` uint8 [R, C]; `block_scale` float32 [ceil(R / rows), ceil(C / columns)] of `block` (rows, columns).
    Raises ShapeError or UsageError for input that does not fit, NonFiniteWeightError for a NaN or infinite result.
    """
    shape, scales = _check(weight, block_scale, block)
    if weight.dtype != np.uint8:
        raise ShapeError(f"a weight is {weight.dtype}, but uint8 (FP8 bits) is needed")
    result = np.empty(weight.shape, np.uint16)
    if not expand_fp8_entry()(_frozen(weight), scales, shape.rows, shape.columns, result):
        raise _first_non_finite(weight, block_scale, shape, result)
    return result


def dequantize_int4(
    packed: npt.NDArray[np.int32], scale_bits: npt.NDArray[np.uint16], group_size: int | None
) -> npt.NDArray[np.uint16]:
    """BF16 bits uint16 [R, C] of packed codes: code * scale, rounded once to nearest, ties to even.

    `packed` int32 [R, C / 8]; `scale_bits` BF16 bits uint16 [R, G]; `group_size` weights a scale, None: the row.
    Raises ShapeError when they do not fit.
    """
    group = check_packed(packed.shape, scale_bits.shape, group_size)
    if packed.dtype != np.int32 or scale_bits.dtype != np.uint16:
        raise ShapeError(f"codes are {packed.dtype} and scales {scale_bits.dtype}, but int32 and uint16 are needed")
    result = np.empty((packed.shape[0], packed.shape[1] * CODES_PER_WORD), np.uint16)
    expand_int4_entry()(_frozen(packed).reshape(-1), _frozen(scale_bits).reshape(-1), group, result.reshape(-1))
    return result


def _frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A contiguous, aligned, read-only view: so numba compiles one variant, mapped files included."""
    view = np.require(array, requirements=["C", "A"]).view()
    view.flags.writeable = False
    return view


def _as_words(weight: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """The chunk's bytes as a flat, read-only array of 64-bit words, copied only when it is not aligned."""
    flat = np.ascontiguousarray(weight).reshape(-1)
    if flat.ctypes.data % np.dtype(WORD_TYPE).alignment:
        flat = flat.copy()
    return _frozen(flat.view(WORD_TYPE))


def _check(
    weight: npt.NDArray[Any], block_scale: npt.NDArray[Any] | None, block: tuple[int, int] | None
) -> tuple[BlockShape, npt.NDArray[np.float32]]:
    if weight.dtype not in (np.uint8, np.uint16):
        raise ShapeError(f"a weight is {weight.dtype}, but uint8 (FP8 bits) or uint16 (BF16 bits) is needed")
    scale_shape = None if block_scale is None else block_scale.shape
    shape = check_source(weight.shape, weight.itemsize * BITS_PER_BYTE, scale_shape, block)
    if block_scale is None:
        return shape, _frozen(np.ones((1, 1), np.float32))
    if block_scale.dtype != np.float32:
        raise ShapeError(f"a block scale is {block_scale.dtype}, but float32 is needed", remedy="convert it first")
    return shape, _frozen(block_scale)


def _first_non_finite(
    weight: npt.NDArray[Any],
    block_scale: npt.NDArray[Any] | None,
    shape: BlockShape,
    bf16: npt.NDArray[np.uint16] | None = None,
) -> NonFiniteWeightError:
    """The error for the first weight (row-major) that is not finite as float32, or in `bf16` when that is given."""
    for row in range(weight.shape[0]):
        if block_scale is None:
            bits = weight[row].astype(np.uint32) << BF16_SHIFT
        else:
            scale = np.repeat(block_scale[row // shape.rows], shape.columns)[: weight.shape[1]]
            bits = scaled_bits_entry()(_frozen(weight[row]), scale)
        bad = (bits & F32_INFINITY_BITS) == F32_INFINITY_BITS
        if bf16 is not None:
            bad |= (bf16[row] & BF16_INFINITY_BITS) == BF16_INFINITY_BITS
        if bad.any():
            column = int(bad.argmax())
            at = None if block_scale is None else float(block_scale[row // shape.rows, column // shape.columns])
            return NonFiniteWeightError(row, column, int(weight[row, column]), at)
    raise RuntimeError("a kernel reported a weight that is not finite, but every weight is")
