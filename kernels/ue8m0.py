"""Decodes UE8M0 block scales on the CPU; same values as float8_reference.decode_ue8m0."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from memopt.errors import ShapeError
from memopt.kernels.layout import UE8M0_BIAS, UE8M0_CODES, UE8M0_NAN


def decode_ue8m0(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Decodes exponent bytes to float32 scales of the same shape: 2 ** (byte - 127), and 255 is NaN.

    `codes`: uint8, any shape. Byte 0 is 2**-127, a subnormal float32. A NaN is not refused here: the kernels refuse it
    where it meets a weight, and name the place. Raises ShapeError when `codes` is not uint8.
    Source: OCP Microscaling Formats v1.0, section 5.4.1.
    """
    if codes.dtype != np.uint8:
        raise ShapeError(f"UE8M0 scales are {codes.dtype}, but uint8 is needed", remedy="view the bytes as uint8")
    table = np.full(UE8M0_CODES, np.nan, np.float32)
    table[:UE8M0_NAN] = np.ldexp(np.float32(1), np.arange(UE8M0_NAN) - UE8M0_BIAS)
    return table[codes]
