"""The rounding rule in words and numbers: written into release.json, and part of a run's fingerprint."""

from __future__ import annotations

from typing import Any

from memopt.kernels.int4_spec import SCALE_GRID
from memopt.kernels.layout import INT4_CODE_MAX, INT4_CODE_MIN, INT4_HALF_SPAN


def rounding_rule() -> dict[str, Any]:
    """The exact rule behind the codes, so that anybody can repeat it."""
    return {
        "codes": [INT4_CODE_MIN, INT4_CODE_MAX],
        "absmax_scale": f"bf16(max|w| / {INT4_HALF_SPAN})",
        "code": "clamp(round_half_even(w / scale), codes), against the stored scale",
        "search_factors": list(SCALE_GRID),
    }
