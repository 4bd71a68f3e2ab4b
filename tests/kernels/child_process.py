"""Children that run side by side, a core each, while the tests that wait for them run one after another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# pytest keeps a test file on one worker, so the files that start children use the cores themselves.
MAX_CHILDREN = 2


@dataclass(frozen=True)
class ChildResult:
    """What a finished child left: `ended` is "exit code n", "killed by SIGSEGV" or "still running after n s"."""

    ended: str
    output: str

    @property
    def is_success(self) -> bool:
        """True when it ended by itself with code 0."""
        return self.ended == "exit code 0"


def run_child(arguments: Sequence[str], environment: Mapping[str, str], timeout_seconds: float) -> ChildResult:
    """Runs this Python with `arguments` at the root of the repository; `environment` is added to this process's."""
    threads = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))}
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**inherited, **threads, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout_seconds,
        )
    except subprocess.TimeoutExpired as problem:
        output = problem.stdout or b""
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        return ChildResult(f"still running after {timeout_seconds:g} s", text)
    if done.returncode < 0:
        return ChildResult(f"killed by {signal.Signals(-done.returncode).name}", done.stdout)
    return ChildResult(f"exit code {done.returncode}", done.stdout)


@contextmanager
def started(
    commands: Mapping[str, Sequence[str]], environment: Mapping[str, str], timeout_seconds: float
) -> Iterator[dict[str, Future[ChildResult]]]:
    """Starts every command (name -> arguments), a few at a time; waits for the running ones at the end."""
    pool = ThreadPoolExecutor(max_workers=MAX_CHILDREN)
    try:
        yield {
            name: pool.submit(run_child, arguments, environment, timeout_seconds)
            for name, arguments in commands.items()
        }
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
