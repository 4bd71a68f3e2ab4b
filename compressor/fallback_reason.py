"""Why a calibrated weight has a lesser method than its recipe asks for, in words and as the ledger's number."""

from __future__ import annotations

from enum import StrEnum


class FallbackReason(StrEnum):
    """Ledgers hold a reason's `number` (docs/calibration.md): new ones go last."""

    FEW_TOKENS = "too few tokens"
    NO_SIGNAL = "every input was zero"
    SINGULAR = "the Hessian is not positive definite, even with the largest damping"
    NO_GAIN = "plain rounding serves every row better"

    @property
    def number(self) -> int:
        """Its place, from 1: 0 is no fallback."""
        return list(FallbackReason).index(self) + 1
