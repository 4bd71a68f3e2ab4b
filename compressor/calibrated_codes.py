"""Codes that calibration found, held against the source's values: how far off they are, for the ledger."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memopt.compressor.part_checks import bf16_values
from memopt.kernels.layout import (
    CODES_PER_WORD,
    E4M3_EXPONENT_BIAS,
    E4M3_MAGNITUDE_MASK,
    E4M3_MANTISSA_BITS,
    E4M3_NAN_MAGNITUDE,
    E4M3_SIGN_MASK,
    INT4_BITS,
    INT4_CODE_MASK,
    INT4_CODE_MAX,
    INT4_CODE_MIN,
    INT4_CODE_OFFSET,
)


@dataclass(frozen=True, slots=True)
class RowErrors:
    """Of each row float64 [R]: sums of (w - scale * q) ** 2 and of w ** 2. `max_error`: the largest |w - scale * q|."""

    sq_error: npt.NDArray[np.float64]
    energy: npt.NDArray[np.float64]
    max_error: float
    num_clipped: int


def e4m3_values() -> npt.NDArray[np.float32]:
    """float32 [256]: the value of every e4m3 byte (OCP FP8, "E4M3"); NaN where the format has it."""
    codes = np.arange(2 * E4M3_SIGN_MASK)
    magnitude = codes & E4M3_MAGNITUDE_MASK
    exponent = magnitude >> E4M3_MANTISSA_BITS
    fraction = (magnitude & ((1 << E4M3_MANTISSA_BITS) - 1)) / (1 << E4M3_MANTISSA_BITS)
    normal = (1 + fraction) * 2.0 ** (exponent - E4M3_EXPONENT_BIAS)
    value = np.where(exponent == 0, fraction * 2.0 ** (1 - E4M3_EXPONENT_BIAS), normal)
    value = np.where(magnitude == E4M3_NAN_MAGNITUDE, np.nan, value)
    signed: npt.NDArray[np.float32] = np.where(codes & E4M3_SIGN_MASK, -value, value).astype(np.float32)
    return signed


_E4M3_VALUES = e4m3_values()


def stored_values(
    rows: npt.NDArray,
    scale: npt.NDArray[np.float32] | None,
    block: tuple[int, int] | None,
) -> npt.NDArray[np.float32]:
    """float32 [R, C] of a chunk: BF16 bits, or e4m3 bytes times `scale`, one for each `block` (rows, columns)."""
    if scale is None or block is None:
        return bf16_values(rows.astype(np.uint16))
    columns = np.repeat(scale, block[1], axis=1)[:, : rows.shape[1]]
    values: npt.NDArray[np.float32] = _E4M3_VALUES[rows]
    return values * np.repeat(columns, block[0], axis=0)[: rows.shape[0]]


def row_errors(
    values: npt.NDArray[np.float32], packed: npt.NDArray[np.int32], scale_bits: npt.NDArray[np.uint16]
) -> RowErrors:
    """Errors of `packed` int32 [R, C / 8] under `scale_bits` (BF16) [R, G] against `values` [R, C]."""
    rows, columns = values.shape
    shifts = np.arange(CODES_PER_WORD) * INT4_BITS
    nibbles = (packed[:, :, None] >> shifts) & INT4_CODE_MASK
    codes = nibbles.reshape(rows, columns).astype(np.float32) - INT4_CODE_OFFSET
    scale = np.repeat(bf16_values(scale_bits), columns // scale_bits.shape[1], axis=1)
    difference = (values - codes * scale).astype(np.float64)
    wanted = np.rint(values / scale)
    return RowErrors(
        np.square(difference).sum(axis=1),
        np.square(values.astype(np.float64)).sum(axis=1),
        float(np.abs(difference).max(initial=0.0)),
        int(((wanted < INT4_CODE_MIN) | (wanted > INT4_CODE_MAX)).sum()),
    )
