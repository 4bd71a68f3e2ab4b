"""Every GPU kernel against its reference, then against the device's bounds: `python -m benchmarks.gpu.main`.

    python -m benchmarks.gpu.main [--json build/bench-gpu.json] [--seed N] [--limit-seconds 240]

Per case: correctness on fresh random data with poisoned outputs, then the median time of cold runs (L2 flushed) by CUDA
events, bytes moved, and the share of the copy bandwidth (or BF16 rate) measured in the same run and of the datasheet's
bandwidth. No network. Exit code 0: every case ran and was right (a missed goal is only said); 1: a case was wrong or
failed; 9: no CUDA device, nothing was run. A case that is not started before the limit is "not run".
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import platform
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.gpu.bounds import Bounds
from benchmarks.gpu.result import BROKEN, CaseResult, table
from memopt.errors import ExitCode

RIVALS = ("vllm", "flashinfer", "flash_mla", "deep_gemm", "sgl_kernel")
LIMIT_SECONDS = 240.0
# What the case that was started last may take on top.
LAST_CASE_SECONDS = 50.0
EXIT_BROKEN = 1

# Starts the worker at a case number; yields its lines, then its exit code.
StartWorker = Callable[[int], Iterator[str | int]]


@dataclass
class Report:
    """What the workers said so far."""

    bounds: Bounds | None = None
    results: list[CaseResult] = field(default_factory=list)
    running: str | None = None

    def read(self, lines: Iterable[str | int]) -> int:
        """Takes a worker's lines in; returns its exit code. Lines of others (a kernel's prints) are passed over."""
        for line in lines:
            if isinstance(line, int):
                return line
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if not isinstance(message, dict):
                continue
            if "bounds" in message:
                self.bounds = self.bounds or Bounds(**message["bounds"])
            elif "start" in message:
                self.running = message["start"]
            elif "result" in message:
                self.results.append(CaseResult(**message["result"]))
                self.running = None
        return EXIT_BROKEN


def collect(start: StartWorker) -> Report:
    """Runs workers until every case has a result; a worker that dies fails the case it was at."""
    report = Report()
    while True:
        before = len(report.results)
        code = report.read(start(before))
        if code == 0:
            return report
        if report.running is not None:
            why = f"its process was ended by signal {-code}" if code < 0 else f"its process ended with code {code}"
            report.results.append(CaseResult(report.running, "failed", detail=why))
            report.running = None
        elif len(report.results) == before:
            report.results.append(CaseResult("worker", "failed", detail=f"ended with code {code} before any case"))
            return report


def start_worker(first: int, seed: int, seconds_left: float) -> Iterator[str | int]:
    """The lines of a worker in a process of its own, then its exit code. Its stderr stays the terminal's.

    A worker that goes on for LAST_CASE_SECONDS after its time is killed: a kernel may hang.
    """
    arguments = [sys.executable, "-m", "benchmarks.gpu.worker", str(first), str(seed), str(seconds_left)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        timer = threading.Timer(seconds_left + LAST_CASE_SECONDS, process.kill)
        timer.start()
        try:
            if process.stdout is not None:
                yield from process.stdout
        finally:
            timer.cancel()
    yield process.returncode


def main() -> int:
    """Runs everything, writes the JSON file, prints the table last; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("build/bench-gpu.json"), help="where the figures go")
    parser.add_argument("--seed", type=int, default=None, help="of the random data (fresh each time otherwise)")
    parser.add_argument("--limit-seconds", type=float, default=LIMIT_SECONDS, help="no case starts after this")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: no CUDA device", file=sys.stderr)
        return ExitCode.UNSUPPORTED
    seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    deadline = time.monotonic() + options.limit_seconds
    report = collect(lambda first: start_worker(first, seed, max(deadline - time.monotonic(), 0.0)))
    document = {
        "seed": seed,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "bounds": dataclasses.asdict(report.bounds) if report.bounds else None,
        "results": [dataclasses.asdict(result) for result in report.results],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(f"seed {seed}, figures in {options.json}")
    missing = [name for name in RIVALS if importlib.util.find_spec(name) is None]
    print(f"rivals that are not installed, so not run: {', '.join(missing) or 'none'}")
    print(table(report.results, report.bounds))
    return EXIT_BROKEN if any(result.status in BROKEN for result in report.results) else 0


if __name__ == "__main__":
    sys.exit(main())
