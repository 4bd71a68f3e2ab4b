"""What calibration found of one weight: for the ledger, for release.json's totals, and for budgets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from memopt.compressor.fallback_reason import FallbackReason


@dataclass(frozen=True, slots=True)
class CalibrationFigures:
    """Of one weight, or of weights that were rounded together (gate and up).

    `num_tokens`: that reached it, `num_forced_tokens` of them by force. `method`: "plain", "weighted" or "gptq", what
    its codes come from. `damping`: 0 without a solve. `error`, `plain_error`: squared output errors a token of the kept
    codes and of plain rounding, `energy` of the weights themselves. `num_plain_rows` of `num_rows` kept plain codes.
    `fallback`: why `method` is less than what the recipe asked for, "" where it is not.
    """

    num_tokens: int
    num_forced_tokens: int
    method: str
    damping: float
    energy: float
    plain_error: float
    error: float
    num_rows: int
    num_plain_rows: int
    fallback: str

    def ledger_figures(self) -> dict[str, float]:
        """Non-negative numbers for the ledger's "error" table; errors are relative to the energy. `fallback` is 0, or
        its reason's number.
        """
        return {
            "tokens": float(self.num_tokens),
            "forced_tokens": float(self.num_forced_tokens),
            "damping": self.damping,
            "calibrated_error": self.error / self.energy if self.energy else 0.0,
            "plain_error": self.plain_error / self.energy if self.energy else 0.0,
            "plain_row_share": self.num_plain_rows / self.num_rows,
            "fallback": float(FallbackReason(self.fallback).number) if self.fallback else 0.0,
        }

    def table(self) -> dict[str, Any]:
        """As JSON; `figures_of` reads it."""
        return asdict(self)


# For a ledger whose figures are not known yet: same keys, same widths.
BLANK_FIGURES = CalibrationFigures(0, 0, "plain", 0.0, 0.0, 0.0, 0.0, 1, 0, "")


def figures_of(table: Mapping[str, Any]) -> CalibrationFigures:
    """The figures that `CalibrationFigures.table` gave; TypeError for other keys."""
    return CalibrationFigures(**table)
