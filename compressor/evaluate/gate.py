"""A recipe's `gate:`: what a release must not lose. A figure that a limit names and nobody measured fails it.

Figures of tokens count only when they were measured against the very checkpoint that the release was made from (against
itself a release loses nothing), and on MIN_UNITS_TO_RESAMPLE documents or windows: an interval of one has no width.
Limits on them hold for the worse end of the 95 % interval: KL's and the perplexity ratio's upper end, top-1's lower
end, so that few tokens cannot pass by luck. Task scores are held by their mean: their standard error on a benchmark's
few hundred samples is larger than the drop in question (it is printed beside it).
"""

from __future__ import annotations

from dataclasses import dataclass

from memopt.compressor.evaluate.quality import MIN_UNITS_TO_RESAMPLE, SOURCE_KIND, Quality
from memopt.compressor.quality_gate import QualityGate
from memopt.errors import QualityGateError


@dataclass(frozen=True, slots=True)
class GateCheck:
    """One limit. `value` None: not measured, `fault` says why. `is_upper`: `limit` is a largest value."""

    name: str
    value: float | None
    limit: float
    is_upper: bool
    fault: str = ""

    @property
    def holds(self) -> bool:
        """Whether the limit is kept; never for what was not measured."""
        if self.value is None:
            return False
        return self.value <= self.limit if self.is_upper else self.value >= self.limit

    def describe(self) -> str:
        """The check in words."""
        value = f"not measured{self.fault}" if self.value is None else f"{self.value:.6g}"
        return f"{self.name}: {value}, must be {'at most' if self.is_upper else 'at least'} {self.limit:g}"


def check_gate(gate: QualityGate, quality: Quality) -> tuple[GateCheck, ...]:
    """Every limit of `gate` against `quality`, in a fixed order."""
    worst_task = max(quality.tasks, key=lambda score: score.drop, default=None)
    drop = None if worst_task is None else worst_task.drop
    task_name = "" if worst_task is None else f" ({worst_task.task})"
    fault = _fault(quality)

    def of_tokens(name: str, value: float, limit: float | None, *, is_upper: bool) -> tuple[GateCheck, ...]:
        return () if limit is None else (GateCheck(name, None if fault else value, limit, is_upper, fault),)

    ratio = quality.perplexity_ratio.high
    checks = (
        *of_tokens("KL, upper end, nats a token", quality.kl.high, gate.kl_max, is_upper=True),
        *of_tokens("top-1 agreement, lower end", quality.top1.low, gate.top1_min, is_upper=False),
        *of_tokens("perplexity ratio, upper end", ratio, gate.perplexity_ratio_max, is_upper=True),
    )
    if gate.score_drop_max_points is None:
        return checks
    return (*checks, GateCheck(f"largest score drop, points{task_name}", drop, gate.score_drop_max_points, True))


def _fault(quality: Quality) -> str:
    """Why figures of tokens do not count; "" if they do."""
    if quality.base.kind != SOURCE_KIND:
        return " against the checkpoint that the release was made from"
    if quality.num_resampled_units < MIN_UNITS_TO_RESAMPLE:
        return f" on {MIN_UNITS_TO_RESAMPLE} {quality.resampled}s or more"
    return ""


def require_gate(gate: QualityGate, quality: Quality) -> tuple[GateCheck, ...]:
    """`check_gate`; QualityGateError (exit code 5) that lists every limit that does not hold."""
    checks = check_gate(gate, quality)
    failed = [check.describe() for check in checks if not check.holds]
    if failed:
        raise QualityGateError(
            "the quality gate does not hold: " + "; ".join(failed),
            remedy="the release is not signed: measure what was not, compress with another method or group size, or "
            "change the recipe's gate",
        )
    return checks
