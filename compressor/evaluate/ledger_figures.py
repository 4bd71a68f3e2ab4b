"""What the report shows of ledger.jsonl: weight error by layer and role, and how many tokens each expert saw.

Calibrated rows carry "calibration" (compressor/calibrate): `num_tokens`, `damping`, proxy errors and a fallback reason.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from memopt.errors import LedgerError
from memopt.manifests.file_roles import LEDGER_NAME

CALIBRATION_KEY = "calibration"


@dataclass(frozen=True, slots=True)
class LayerError:
    """Mean relative squared error of the `num_tensors` quantized tensors of a role in a layer."""

    layer: int
    role: str
    num_tensors: int
    relative_mse: float


@dataclass(frozen=True, slots=True)
class ExpertCoverage:
    """Tokens that reached the experts of a layer in calibration, and experts that fell back to plain rounding."""

    layer: int
    num_experts: int
    fewest_tokens: int
    median_tokens: int
    most_tokens: int
    num_fallbacks: int


@dataclass(frozen=True, slots=True)
class LedgerFigures:
    """`coverage` is empty for a release that was not calibrated."""

    errors: tuple[LayerError, ...]
    coverage: tuple[ExpertCoverage, ...]


@dataclass(slots=True)
class _Expert:
    num_tokens: int
    is_fallback: bool


def ledger_figures(lines: Iterable[bytes]) -> LedgerFigures:
    """Figures of a ledger's lines; LedgerError naming the line for what is no ledger. One line in memory at a time."""
    errors: dict[tuple[int, str], list[float]] = defaultdict(list)
    experts: dict[int, dict[str, _Expert]] = defaultdict(dict)
    for number, line in enumerate(lines, start=1):
        row = _row(line, number)
        layer, error = row.get("layer"), row.get("error")
        if not isinstance(layer, int):
            continue
        if isinstance(error, dict):
            errors[layer, str(row.get("role"))].append(_number(error.get("relative_mse"), number))
        calibration = row.get(CALIBRATION_KEY)
        if isinstance(calibration, dict) and ".experts." in str(row.get("tensor")):
            # The projections of one expert count once: gate, up and down see the same tokens.
            name = str(row["tensor"]).rsplit(".", 2)[0]
            known = experts[layer].setdefault(name, _Expert(0, False))
            known.num_tokens = max(known.num_tokens, int(_number(calibration.get("num_tokens"), number)))
            known.is_fallback |= calibration.get("fallback") is not None
    return LedgerFigures(
        tuple(
            LayerError(layer, role, len(values), sum(values) / len(values))
            for (layer, role), values in sorted(errors.items())
        ),
        tuple(_coverage(layer, list(found.values())) for layer, found in sorted(experts.items())),
    )


def _coverage(layer: int, experts: list[_Expert]) -> ExpertCoverage:
    """The summary of a layer's experts."""
    tokens = sorted(expert.num_tokens for expert in experts)
    num_fallbacks = sum(expert.is_fallback for expert in experts)
    return ExpertCoverage(layer, len(tokens), tokens[0], tokens[len(tokens) // 2], tokens[-1], num_fallbacks)


def _row(line: bytes, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise LedgerError(f"line {number} is no JSON object", file=LEDGER_NAME, remedy="fetch the release again")
    return row


def _number(value: Any, line: int) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise LedgerError(f"line {line}: {str(value)[:40]!r} is no figure", file=LEDGER_NAME)
    return float(value)
