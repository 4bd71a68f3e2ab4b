"""What became of each expert when it was rounded with calibration data. Plain numbers: no torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memopt.compressor.fallback_reason import FallbackReason

RoundingMethod = Literal["plain", "weighted", "gptq"]


@dataclass(frozen=True, slots=True)
class ExpertReport:
    """One expert, or one dense module (expert 0).

    Errors are squared output errors a calibration token, summed over the rows: sum (w - q) H (w - q)^T under the
    undamped Hessian of that expert's inputs, or under its diagonal for method weighted. `energy` is the same of the
    weights themselves, so that error / energy is relative. `error` is of the codes that were kept, `plain_error` of
    plain rounding, `weighted_error` of rounding under the weighted scales (None where there was none).
    `damping`: the share that the solve used; None without a solve. `num_plain_rows`: rows that kept their plain codes
    because those serve them better. `fallback`: why `method` is less than what was asked for.
    """

    expert: int
    num_tokens: int
    method: RoundingMethod
    damping: float | None
    num_dead_columns: int
    energy: float
    plain_error: float
    weighted_error: float | None
    error: float
    num_rows: int
    num_plain_rows: int
    fallback: FallbackReason | None


def fallback_share(reports: tuple[ExpertReport, ...] | list[ExpertReport]) -> float:
    """The share of experts that fell back; 0 of none. A recipe's `max_fallback` is held against it."""
    return sum(report.fallback is not None for report in reports) / len(reports) if reports else 0.0
