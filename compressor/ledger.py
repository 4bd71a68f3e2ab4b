"""The ledger: one line a logical tensor, the plan balanced against what was read and written.

Every line has a width that the plan fixes (digests and error figures are fixed-width), so that the plan knows the
ledger's size to the byte.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memopt.compressor.calibration_figures import BLANK_FIGURES, CalibrationFigures
from memopt.compressor.ranks.cut import cut_of
from memopt.compressor.ranks.unit_digests import UnitDigests
from memopt.compressor.tensor_plan import Fate, OutputTensor, TensorPlan
from memopt.compressor.units import UnitPlaces

UNKNOWN_DIGEST = "0" * 64
# Below this a figure is written as zero, so that its exponent has two digits.
SMALLEST_FIGURE = 1e-98
# What is written for a figure that no float32 sum can hold: squares of weights above 1.8e19 overflow.
LARGEST_FIGURE = 9.9e98


@dataclass(frozen=True, slots=True)
class ErrorFigures:
    """How far INT4 weights are from the source's.

    `sq_error` and `energy`: sums of squares of w - scale * q, and of w. `max_error`: largest |w - scale * q|.
    """

    sq_error: float = 0.0
    energy: float = 0.0
    max_error: float = 0.0
    num_clipped: int = 0
    num_weights: int = 0

    @property
    def relative_mse(self) -> float:
        """Infinite if a sum overflowed: how far the weights are is then unknown, not small."""
        if not (math.isfinite(self.sq_error) and math.isfinite(self.energy)):
            return math.inf
        return self.sq_error / self.energy if self.energy else 0.0

    @property
    def clipped_share(self) -> float:
        return self.num_clipped / self.num_weights if self.num_weights else 0.0

    def summary(self) -> ErrorSummary:
        """The figures as release.json prints them."""
        return ErrorSummary(*(float(fixed_width(x)) for x in (self.relative_mse, self.max_error, self.clipped_share)))

    def __add__(self, other: ErrorFigures) -> ErrorFigures:
        return ErrorFigures(
            self.sq_error + other.sq_error,
            self.energy + other.energy,
            max(self.max_error, other.max_error),
            self.num_clipped + other.num_clipped,
            self.num_weights + other.num_weights,
        )


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """A role's error figures with seven digits, as printed: LARGEST_FIGURE stands for one that overflowed."""

    relative_mse: float
    max_error: float
    clipped_share: float


@dataclass(frozen=True, slots=True)
class TensorResult:
    """What one tensor's work gave: the SHA-256 (hex) of every part read, by stored name, and error figures.

    `calibration`: for a weight whose codes follow from calibration data.
    """

    source_sha256: Mapping[str, str]
    errors: ErrorFigures | None = None
    calibration: CalibrationFigures | None = None


def figure(value: float) -> float:
    """`value` kept within the range whose text has a fixed width; NaN counts as overflowed."""
    if math.isnan(value):
        return LARGEST_FIGURE
    return 0.0 if value < SMALLEST_FIGURE else min(value, LARGEST_FIGURE)


def fixed_width(value: float) -> str:
    """A non-negative JSON number of 12 characters, six decimals: 1.234567e-03."""
    return f"{figure(value):.6e}"


def ledger_line(row: dict[str, Any]) -> bytes:
    """One JSON line of the ledger, keys in order, error figures last and of fixed width."""
    errors = row.get("error")
    if errors is None:
        return (json.dumps(row, ensure_ascii=False) + "\n").encode()
    head = json.dumps({key: value for key, value in row.items() if key != "error"}, ensure_ascii=False)
    figures = ", ".join(f"{json.dumps(name)}: {fixed_width(value)}" for name, value in errors.items())
    return f'{head[:-1]}, "error": {{{figures}}}}}\n'.encode()


def ledger_row(
    plan: TensorPlan,
    places: UnitPlaces | None,
    result: TensorResult | None = None,
    digests: UnitDigests | None = None,
) -> dict[str, Any]:
    """The row of one tensor of a unit whose tensors lie at `places` (None for a tensor without outputs).

    Digests and figures that are not given are zeros of the same width.
    """
    found = result or TensorResult({})
    row: dict[str, Any] = {
        "tensor": plan.source.spec.name,
        "role": str(plan.source.spec.role),
        "layer": plan.source.spec.layer,
        "mtp": plan.source.spec.is_mtp,
        "fate": str(plan.fate),
        "source_format": plan.source.description,
        "format": plan.output_format,
        "sources": [
            {
                "name": part.name,
                "file": part.file,
                "dtype": part.dtype,
                "shape": list(part.shape),
                "offset": part.start,
                "size_bytes": part.size_bytes,
                # A dropped tensor is never read, so that it has no digest.
                "sha256": found.source_sha256.get(part.name, UNKNOWN_DIGEST) if plan.outputs else None,
            }
            for part in plan.source.parts
        ],
        "outputs": [] if places is None else [_output_row(plan, output, places, digests) for output in plan.outputs],
    }
    if plan.fate is Fate.QUANTIZED:
        errors = found.errors or ErrorFigures()
        row["error"] = {
            "relative_mse": errors.relative_mse,
            "max_error": errors.max_error,
            "clipped_share": errors.clipped_share,
        }
        if plan.int4 is not None and plan.int4.is_calibrated:
            row["error"] |= (found.calibration or BLANK_FIGURES).ledger_figures()
    if plan.reason:
        row["reason"] = plan.reason
    return row


def _output_row(
    plan: TensorPlan, output: OutputTensor, places: UnitPlaces, digests: UnitDigests | None
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": output.name,
        "file": None,
        "dtype": output.dtype,
        "shape": list(output.shape),
        "data_offsets": None,
        "sha256": UNKNOWN_DIGEST if digests is None else digests.whole.get(output.name, UNKNOWN_DIGEST),
    }
    return placed_output(row, plan, output, places, digests)


def placed_output(
    row: Mapping[str, Any],
    plan: TensorPlan,
    output: OutputTensor,
    places: UnitPlaces,
    digests: UnitDigests | None = None,
) -> dict[str, Any]:
    """An entry of "outputs" as it is for `places`: hub file and offsets (null without one), then "ranks" if there are.

    The digest of the whole tensor stays; those of the slices come from `digests`, zeros if it is None.
    """
    placed = dict(row)
    placed.pop("ranks", None)
    hub = places.hub[output.name]
    placed["file"] = places.hub_file
    placed["data_offsets"] = None if places.hub_file is None else [hub.start, hub.end]
    if places.ranks is not None:
        cut, header = cut_of(output, plan, places.ranks), places.in_ranks[output.name]
        unknown = (UNKNOWN_DIGEST,) * cut.num_digests
        placed["ranks"] = {
            "folder": places.ranks.folder,
            "cut": str(cut.kind),
            **({} if cut.owner is None else {"owner": cut.owner}),
            "shape": list(header.shape),
            "data_offsets": [header.start, header.end],
            "sha256": list(unknown if digests is None else digests.ranks.get(output.name, unknown)),
        }
    return placed
