"""Where a stored tensor holds NaN or infinity, told from its bits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from memopt.kernels.layout import E4M3_MAGNITUDE_MASK, E4M3_NAN_MAGNITUDE, UE8M0_NAN

# Exponent bits, all set in NaN and infinity: IEEE binary16, binary32, binary64, and BF16 as the upper half of binary32.
_EXPONENT_BITS: dict[str, tuple[type[np.unsignedinteger], int]] = {
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
    "F32": (np.uint32, 0x7F800000),
    "F64": (np.uint64, 0x7FF0000000000000),
}


def first_non_finite(data: npt.NDArray[np.uint8], dtype: str) -> int | None:
    """Index of the first element of `data` (bytes of safetensors type `dtype`) that is NaN or infinite, else None.

    Types without such values (integers) give None. UE8M0 scales that are stored as U8 must be called F8_E8M0.
    """
    if dtype == "F8_E4M3":
        bad = (data & E4M3_MAGNITUDE_MASK) == E4M3_NAN_MAGNITUDE
    elif dtype == "F8_E8M0":
        bad = data == UE8M0_NAN
    elif dtype in _EXPONENT_BITS:
        kind, mask = _EXPONENT_BITS[dtype]
        bad = (data.view(kind) & kind(mask)) == kind(mask)
    else:
        return None
    return int(bad.argmax()) if bad.any() else None
