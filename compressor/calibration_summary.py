"""What a finished release's ledger says of its calibrated weights, by role: for the end of `memopt compress`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from memopt.errors import LedgerError
from memopt.manifests.file_roles import LEDGER_NAME
from memopt.manifests.strict_json import parse_json_object


@dataclass(frozen=True, slots=True)
class CalibrationSummary:
    """A role's calibrated weights. `fewest_tokens`: that any of them was calibrated on.

    `output_error`, `plain_output_error`: squared output errors of the kept codes and of plain rounding on the
    calibration inputs, relative to the output's energy; means over weights. `num_fallbacks` have codes of a lesser
    method than the recipe asks for.
    """

    num_weights: int
    num_fallbacks: int
    fewest_tokens: int
    output_error: float
    plain_output_error: float


def calibration_by_role(lines: Iterable[bytes]) -> dict[str, CalibrationSummary]:
    """The summaries of a ledger's lines, one of them in memory at a time; LedgerError for what is no ledger."""
    rows: dict[str, list[_Figures]] = {}
    for number, line in enumerate(lines, start=1):
        row = parse_json_object(line, f"{LEDGER_NAME}:{number}", LedgerError)
        error = row.get("error")
        if isinstance(error, dict) and "calibrated_error" in error:
            rows.setdefault(str(row.get("role")), []).append(_figures(error, number))
    return {role: _summary(figures) for role, figures in sorted(rows.items())}


@dataclass(frozen=True, slots=True)
class _Figures:
    num_tokens: int
    is_fallback: bool
    output_error: float
    plain_output_error: float


def _figures(error: dict[str, Any], line: int) -> _Figures:
    try:
        return _Figures(
            int(error["tokens"]),
            bool(error["fallback"]),
            float(error["calibrated_error"]),
            float(error["plain_error"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        raise LedgerError(
            f"line {line}: its calibration figures are none", file=LEDGER_NAME, remedy="compress again"
        ) from None


def _summary(figures: list[_Figures]) -> CalibrationSummary:
    return CalibrationSummary(
        len(figures),
        sum(each.is_fallback for each in figures),
        min(each.num_tokens for each in figures),
        sum(each.output_error for each in figures) / len(figures),
        sum(each.plain_output_error for each in figures) / len(figures),
    )
