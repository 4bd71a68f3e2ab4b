"""What came of a case, and whether it reached its goal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from benchmarks.gpu.bounds import Bounds
from benchmarks.gpu.case import GoalKind

# "wrong": the correctness check failed, so no time was taken. "failed": it raised, or its process died.
Status = Literal["reached", "missed", "wrong", "failed", "not run"]
BROKEN: tuple[Status, ...] = ("wrong", "failed")


@dataclass(frozen=True)
class CaseResult:
    """Figures are None where they were not measured. Shares are of the bound that their name says."""

    name: str
    status: Status
    detail: str = ""
    error: float | None = None
    tolerance: float | None = None
    seconds: float | None = None
    bytes_moved: int | None = None
    flops: int | None = None
    copy_share: float | None = None
    datasheet_share: float | None = None
    bf16_share: float | None = None
    goal: float | None = None
    goal_kind: GoalKind | None = None
    peer_seconds: Mapping[str, float] = field(default_factory=dict)
    peer_failures: Mapping[str, str] = field(default_factory=dict)


def measured(
    name: str,
    bounds: Bounds,
    *,
    error: float,
    tolerance: float,
    seconds: float,
    bytes_moved: int,
    flops: int,
    goal: float,
    goal_kind: GoalKind,
    peer_seconds: Mapping[str, float],
    peer_failures: Mapping[str, str],
) -> CaseResult:
    """The result of a case that ran right and was timed; "reached" or "missed" against its goal.

    A bandwidth goal is a share of the datasheet's figure; of the measured copy on a device that is not listed.
    """
    datasheet = bounds.datasheet_bytes_per_second
    copy_share = bytes_moved / seconds / bounds.copy_bytes_per_second
    datasheet_share = bytes_moved / seconds / datasheet if datasheet else None
    bf16_share = flops / seconds / bounds.bf16_flops_per_second
    detail = ""
    if goal_kind == "microseconds":
        is_reached = seconds * 1e6 <= goal
    elif goal_kind == "bf16_flops":
        is_reached = bf16_share >= goal
    else:
        is_reached = (copy_share if datasheet_share is None else datasheet_share) >= goal
        detail = "" if datasheet else "goal taken of the measured copy: no datasheet figure for this device"
    return CaseResult(
        name=name,
        status="reached" if is_reached else "missed",
        detail=detail,
        error=error,
        tolerance=tolerance,
        seconds=seconds,
        bytes_moved=bytes_moved,
        flops=flops,
        copy_share=copy_share,
        datasheet_share=datasheet_share,
        bf16_share=bf16_share if flops else None,
        goal=goal,
        goal_kind=goal_kind,
        peer_seconds=dict(peer_seconds),
        peer_failures=dict(peer_failures),
    )


def table(results: list[CaseResult], bounds: Bounds | None) -> str:
    """A line a case: status, error, microseconds, shares, goal, peers as times of ours. Measured bounds first."""
    lines = []
    if bounds is not None:
        sheet = bounds.datasheet_bytes_per_second
        lines.append(
            f"{bounds.device}: copy {bounds.copy_bytes_per_second / 1e12:.2f} TB/s measured, "
            f"{f'{sheet / 1e12:.2f} TB/s by its datasheet' if sheet else 'not in the list of datasheets'}, "
            f"BF16 {bounds.bf16_flops_per_second / 1e12:.0f} TFLOP/s measured, "
            f"empty run {bounds.empty_seconds * 1e6:.1f} us"
        )
    width = max((len(result.name) for result in results), default=4)
    lines.append(f"{'case':{width}}  status   error     us        copy  sheet bf16  goal")
    for result in results:
        lines.append(f"{result.name:{width}}  {result.status:7}  {_figures(result)}".rstrip())
        peers = [f"{name} {_ratio(seconds, result.seconds)}" for name, seconds in result.peer_seconds.items()]
        peers += [f"{name} not run: {why}" for name, why in result.peer_failures.items()]
        lines += [f"{'':{width}}    {peer}" for peer in peers]
    counts = {status: sum(result.status == status for result in results) for status in get_args(Status)}
    lines.append(", ".join(f"{count} {status}" for status, count in counts.items() if count) or "no cases")
    return "\n".join(lines)


def _figures(result: CaseResult) -> str:
    if result.seconds is None:
        error = "" if result.error is None else f"error {result.error:.2e} > {result.tolerance:.1e}  "
        return f"{error}{result.detail}"
    shares = (result.copy_share, result.datasheet_share, result.bf16_share)
    cells = "  ".join(f"{share:4.2f}" if share is not None else "   -" for share in shares)
    unit = {"bandwidth": "of bandwidth", "bf16_flops": "of BF16 rate", "microseconds": "us at most", None: ""}
    goal = f"{result.goal:g} {unit[result.goal_kind]}"
    return f"{result.error:8.1e}  {result.seconds * 1e6:8.1f}  {cells}  {goal}  {result.detail}"


def _ratio(seconds: float, ours: float | None) -> str:
    return f"{seconds * 1e6:.1f} us" + (f" ({seconds / ours:.2f} of ours)" if ours else "")
