"""A recipe's `max_fallback`: how many weights may end with a lesser method than it asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from memopt.compressor.calibration_figures import CalibrationFigures
from memopt.compressor.recipe import Int4Format
from memopt.compressor.tensor_plan import TensorPlan
from memopt.errors import ContentError, QualityGateError

NUM_NAMED = 3


def require_fallback_budget(tensors: Iterable[TensorPlan], figures: Mapping[str, CalibrationFigures]) -> None:
    """QualityGateError (exit code 5) naming some weights when more than a format's `max_fallback` of its weights fell
    back; nothing is signed then, and what was calibrated is kept. ContentError for a weight without figures.
    """
    by_form: dict[Int4Format, list[str]] = {}
    for plan in tensors:
        if plan.int4 is not None and plan.int4.is_calibrated:
            by_form.setdefault(plan.int4, []).append(plan.source.spec.name)
    for form, names in by_form.items():
        missing = next((name for name in names if name not in figures), None)
        if missing is not None:
            raise ContentError(
                "its layer was calibrated, but it has no codes",
                tensor=missing,
                remedy="remove the output folder to calibrate anew",
            )
        fallen = [name for name in names if figures[name].fallback]
        # A quotient is the number next to the share; a product of a share such as 0.29 may lie below a whole number.
        if len(fallen) / len(names) > (form.max_fallback or 0.0):
            named = ", ".join(f"{name} ({figures[name].fallback})" for name in fallen[:NUM_NAMED])
            more = f" and {len(fallen) - NUM_NAMED:,} more" if len(fallen) > NUM_NAMED else ""
            raise QualityGateError(
                f"{len(fallen):,} of {len(names):,} weights with method {form.method} fell back to plain rounding, "
                f"max_fallback allows {form.max_fallback:.2%}: {named}{more}",
                remedy="calibrate on more or other data, or raise max_fallback in the recipe",
            )
