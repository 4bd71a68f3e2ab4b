"""What the report shows of ledger.jsonl: weight error by layer and role, and how many tokens each expert saw.

A calibrated row's "error" holds "tokens" and "fallback" too (compressor/calibration_figures.py).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from memopt.compressor.families.roles import Role
from memopt.errors import LedgerError
from memopt.manifests.file_roles import LEDGER_NAME
from memopt.manifests.strict_json import parse_json_object

MAX_LAYERS = 2**16


@dataclass(frozen=True, slots=True)
class LayerError:
    """Mean relative squared error of the `num_tensors` quantized tensors of a role in a layer."""

    layer: int
    role: str
    num_tensors: int
    relative_mse: float


@dataclass(frozen=True, slots=True)
class ExpertCoverage:
    """Tokens that the experts of a layer saw in calibration, and how many experts have a weight whose codes come from a
    lesser method than the recipe asks for.
    """

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
        row = parse_json_object(line, f"{LEDGER_NAME}:{number}", LedgerError)
        layer, error, role = row.get("layer"), row.get("error"), str(row.get("role"))
        if layer is None or error is None:
            continue
        if type(layer) is not int or not 0 <= layer < MAX_LAYERS or not isinstance(error, dict):
            raise LedgerError(f"line {number}: layer or error is none", file=LEDGER_NAME, remedy="compress again")
        errors[layer, role].append(_number(error.get("relative_mse"), number))
        if role == Role.ROUTED_EXPERT and "tokens" in error:
            # The projections of one expert count once: gate, up and down see the same tokens.
            name = str(row.get("tensor")).rsplit(".", 2)[0]
            known = experts[layer].setdefault(name, _Expert(0, False))
            known.num_tokens = max(known.num_tokens, int(_number(error["tokens"], number)))
            known.is_fallback |= _number(error.get("fallback"), number) > 0
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


def _number(value: Any, line: int) -> float:
    """A figure as the ledger writes it: not below zero, and finite."""
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise LedgerError(f"line {line}: {str(value)[:40]!r} is no figure", file=LEDGER_NAME, remedy="compress again")
    try:
        return float(value)
    except OverflowError:
        raise LedgerError(f"line {line}: a figure has too many digits", file=LEDGER_NAME) from None
