"""Dies at each step that changes the disk, in turn, and runs again: `python crash_points.py SOURCE WORK MODE JOB`.

A step is a call that creates, renames, flushes or removes something. Before step k the process ends as a power cut
would end it: files that were not flushed lose the second half of their bytes. Prints one JSON object:
{"points": how many steps there are, "problems": [...]}. MODE: "once" (every k), "twice" (sampled pairs of k, two
workers). JOB: "hub" or "ranks" (compress, without and with the files of two ranks), "shard", "merge".
"""

from __future__ import annotations

import builtins
import json
import os
import random
import shutil
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import memopt
from faults.small_source import OPTIONS, RANK_OPTIONS, compress
from faults.trees import finished_files, stamps, tree

DEAD = 9
SEED = 20260107
NUM_PAIRS = 25
# Runs a job from a folder into another, with so many workers.
Run = Callable[[Path, Path, int], Any]
JOBS: dict[str, Run] = {
    "hub": lambda source, out, workers: compress(source, out, workers=workers, options=OPTIONS),
    "ranks": lambda source, out, workers: compress(source, out, workers=workers, options=RANK_OPTIONS),
    "shard": lambda source, out, workers: memopt.shard(source, out, tensor_parallel=2, workers=workers),
    "merge": lambda source, out, workers: memopt.merge(source, out, workers=workers),
}


class PowerCut:
    """Patches the process so that it dies before its `step`-th change of the disk."""

    def __init__(self, step: int) -> None:
        self.left = step
        self._unflushed: set[str] = set()
        self._lock = threading.RLock()

    def install(self) -> None:
        for name in ("mkdir", "unlink", "rmdir", "truncate"):
            self._patch(os, name, lambda *a, **k: None)
        for name in ("replace", "rename"):
            self._patch(os, name, self._renamed)
        self._patch(os, "fsync", self._flushed)
        self._patch(os, "open", lambda *a, **k: None, is_step=lambda a: bool(a[1] & os.O_CREAT))
        self._patch(builtins, "open", self._opened, is_step=lambda a: len(a) > 1 and "w" in a[1])

    def _patch(
        self, module: Any, name: str, after: Callable[..., None], is_step: Callable[[Any], bool] = lambda _: True
    ) -> None:
        original = getattr(module, name)

        def patched(*arguments: Any, **options: Any) -> Any:
            if not is_step(arguments):
                return original(*arguments, **options)
            with self._lock:
                self.left -= 1
                if self.left == 0:
                    self._die()
                result = original(*arguments, **options)
                after(*arguments, **options)
                return result

        setattr(module, name, patched)

    def _opened(self, path: Any, *_: Any, **__: Any) -> None:
        self._unflushed.add(os.path.realpath(path))

    def _flushed(self, descriptor: int) -> None:
        self._unflushed.discard(os.readlink(f"/proc/self/fd/{descriptor}"))

    def _renamed(self, old: Any, new: Any) -> None:
        if os.path.abspath(old) in self._unflushed:
            self._unflushed.add(os.path.abspath(new))

    def _die(self) -> None:
        self.left = -1
        for path in self._unflushed:
            if os.path.isfile(path):
                os.truncate(path, os.path.getsize(path) // 2)
        os._exit(DEAD)


def run_child(source: Path, out: Path, run: Run, *, step: int | None, workers: int) -> int:
    """Run the job in a forked process that dies before `step`; its exit code."""
    child = os.fork()
    if child == 0:
        try:
            if step is not None:
                PowerCut(step).install()
            run(source, out, workers)
            os._exit(0)
        except BaseException:  # noqa: BLE001 (a forked child must end here)
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def count_steps(source: Path, out: Path, run: Run) -> int:
    """How many steps an undisturbed run takes."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        never = 10**9
        cut = PowerCut(never)
        cut.install()
        run(source, out, 1)
        os.write(writer, str(never - cut.left).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return int(os.read(reader, 100))


def problems_at(
    source: Path, out: Path, run: Run, expected: dict[str, str], steps: tuple[int, ...], workers: int
) -> list[str]:
    """Die before each of `steps`, run to the end, and compare with an uninterrupted run."""
    found: list[str] = []
    for step in steps:
        code = run_child(source, out, run, step=step, workers=workers)
        if code not in {0, DEAD}:
            found.append(f"steps {steps}: exit code {code} before step {step}")
    finished = finished_files(out)
    before = stamps(out, finished)
    if run_child(source, out, run, step=None, workers=workers) != 0:
        return [*found, f"steps {steps}: cannot be resumed"]
    if stamps(out, finished) != before:
        found.append(f"steps {steps}: finished units were written again")
    after = tree(out)
    if after != expected:
        found.append(f"steps {steps}: {sorted(dict(after.items() ^ expected.items()))} differ")
    shutil.rmtree(out)
    return found


def main() -> None:
    source, work, mode = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    run = JOBS[sys.argv[4]]
    if sys.argv[4] in {"shard", "merge"}:
        source = compress(source, work / "release", options=OPTIONS if sys.argv[4] == "shard" else RANK_OPTIONS).out
    reference = work / "reference"
    run(source, reference, 1)
    expected = tree(reference)
    points = count_steps(source, work / "count", run)
    problems: list[str] = []
    if mode == "once":
        for step in range(1, points + 1):
            problems += problems_at(source, work / "out", run, expected, (step,), workers=1)
    else:
        chosen = random.Random(SEED)
        for _ in range(NUM_PAIRS):
            pair = (chosen.randint(1, points), chosen.randint(1, points))
            problems += problems_at(source, work / "out", run, expected, pair, workers=2)
    print(json.dumps({"points": points, "problems": problems}))


if __name__ == "__main__":
    main()
