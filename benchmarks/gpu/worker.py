"""Runs cases on the device and prints one JSON object a line. `main.py` starts it, and again after a crash.

A kernel that reads out of bounds takes its process along (or leaves a CUDA context in which nothing works), so the
cases run here and the report is made elsewhere. Lines: {"bounds": …}, {"start": name}, {"result": …}.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.gpu.bounds import Bounds, measure_bounds
from benchmarks.gpu.case import GpuCase
from benchmarks.gpu.discover import BrokenModule, find_cases, one_line
from benchmarks.gpu.result import CaseResult, measured
from benchmarks.gpu.timing import Stopwatch, cuda_stopwatch, median_seconds, poison

# The device's state is lost: nothing else can run in this process.
EXIT_DEVICE_LOST = 3


def run_case(case: GpuCase, seed: int, device: str, stopwatch: Stopwatch, bounds: Bounds) -> CaseResult:
    """Correctness on fresh data with poisoned outputs, then times of the kernel and its peers.

    Raises what the kernel or its check raises; a peer's error is only recorded.
    """
    prepared = case.prepare(torch.Generator(device).manual_seed(seed))
    for output in prepared.outputs:
        poison(output)
    prepared.run()
    error = prepared.check()
    if not error <= prepared.tolerance:  # NaN is wrong too
        return CaseResult(
            case.name,
            "wrong",
            error=error if math.isfinite(error) else None,
            tolerance=prepared.tolerance,
            detail="" if math.isfinite(error) else f"the error is {error}",
        )
    seconds = median_seconds(prepared.run, stopwatch)
    peer_seconds: dict[str, float] = {}
    peer_failures: dict[str, str] = {}
    for name, peer in prepared.peers.items():
        try:
            peer_seconds[name] = median_seconds(peer, stopwatch)
        except Exception as failure:  # noqa: BLE001 - a rival's failure is reported beside our figure
            peer_failures[name] = one_line(failure)
    return measured(
        case.name,
        bounds,
        error=error,
        tolerance=prepared.tolerance,
        seconds=seconds,
        bytes_moved=prepared.bytes_moved,
        flops=prepared.flops,
        goal=case.goal,
        goal_kind=case.goal_kind,
        peer_seconds=peer_seconds,
        peer_failures=peer_failures,
    )


def run_cases(
    cases: list[GpuCase | BrokenModule],
    first: int,
    run: Callable[[GpuCase, int], CaseResult],
    emit: Callable[[dict[str, object]], None],
    is_time_left: Callable[[], bool],
    device_works: Callable[[], bool],
) -> bool:
    """Runs `cases` from number `first` on through `run(case, number)`; False if the device was lost on the way."""
    for number, case in enumerate(cases[first:], start=first):
        emit({"start": case.name})
        if isinstance(case, BrokenModule):
            result = CaseResult(case.name, "failed", detail=case.reason)
        elif not is_time_left():
            result = CaseResult(case.name, "not run", detail="the time limit was reached")
        else:
            try:
                result = run(case, number)
            except Exception as error:  # noqa: BLE001 - the other cases must run
                result = CaseResult(case.name, "failed", detail=one_line(error))
        emit({"result": dataclasses.asdict(result)})
        if result.status == "failed" and not device_works():
            return False
    return True


def emit_line(message: dict[str, object]) -> None:
    """One JSON line on stdout."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _device_works() -> bool:
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def main(first: int, seed: int, seconds_left: float) -> int:
    """Entry of the child process: cases from number `first` on, none started after `seconds_left`."""
    deadline = time.monotonic() + seconds_left
    stopwatch = cuda_stopwatch()
    bounds = measure_bounds(stopwatch)
    emit_line({"bounds": dataclasses.asdict(bounds)})

    def run(case: GpuCase, number: int) -> CaseResult:
        torch.cuda.empty_cache()
        return run_case(case, seed + number, "cuda", stopwatch, bounds)

    is_whole = run_cases(list(find_cases()), first, run, emit_line, lambda: time.monotonic() < deadline, _device_works)
    return 0 if is_whole else EXIT_DEVICE_LOST


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
