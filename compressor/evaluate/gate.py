"""A recipe's `gate:`: what a release must not lose. A figure that a limit names and nobody measured fails it.

Limits on tokens hold for the worse end of the 95 % interval: KL's and the perplexity ratio's upper end, top-1's lower
end, so that few tokens cannot pass by luck. Task scores are held by their mean: their standard error on a benchmark's
few hundred samples is larger than the drop in question (it is printed beside it).
"""

from __future__ import annotations

from dataclasses import dataclass

from memopt.compressor.evaluate.quality import Quality
from memopt.compressor.quality_gate import QualityGate
from memopt.errors import QualityGateError


@dataclass(frozen=True, slots=True)
class GateCheck:
    """One limit. `value` None: not measured. `is_upper`: `limit` is a largest value."""

    name: str
    value: float | None
    limit: float
    is_upper: bool

    @property
    def holds(self) -> bool:
        """Whether the limit is kept; never for what was not measured."""
        if self.value is None:
            return False
        return self.value <= self.limit if self.is_upper else self.value >= self.limit

    def describe(self) -> str:
        """The check in words."""
        value = "not measured" if self.value is None else f"{self.value:.6g}"
        return f"{self.name}: {value}, must be {'at most' if self.is_upper else 'at least'} {self.limit:g}"


def check_gate(gate: QualityGate, quality: Quality) -> tuple[GateCheck, ...]:
    """Every limit of `gate` against `quality`, in a fixed order."""
    worst_task = max(quality.tasks, key=lambda score: score.drop, default=None)
    drop = None if worst_task is None else worst_task.drop
    task_name = "" if worst_task is None else f" ({worst_task.task})"
    candidates = (
        ("KL, upper end, nats a token", quality.kl.high, gate.kl_max, True),
        ("top-1 agreement, lower end", quality.top1.low, gate.top1_min, False),
        ("perplexity ratio, upper end", quality.perplexity_ratio.high, gate.perplexity_ratio_max, True),
        (f"largest score drop, points{task_name}", drop, gate.score_drop_max_points, True),
    )
    return tuple(
        GateCheck(name, value, limit, is_upper) for name, value, limit, is_upper in candidates if limit is not None
    )


def require_gate(gate: QualityGate, quality: Quality) -> tuple[GateCheck, ...]:
    """`check_gate`; QualityGateError (exit code 5) that lists every limit that does not hold."""
    checks = check_gate(gate, quality)
    failed = [check.describe() for check in checks if not check.holds]
    if failed:
        raise QualityGateError(
            "the quality gate does not hold: " + "; ".join(failed),
            remedy="the release is not signed; compress with another method or group size, or change the recipe's gate",
        )
    return checks
