"""Peak host memory of `memopt compress` at several checkpoint sizes, and its growth from unit to unit.

    python benchmarks/memory.py [--gib 1 8] [--many] [--folder DIR] [--workers 2]

Each size runs in a process of its own. `--many` adds a checkpoint of GLM-5.2's 118,629 tensors, each of them tiny: the
plan and the ledger grow with the number of tensors, whatever their size. Wanted: peak RSS at most 1.5 GiB always, and
flat from unit to unit.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from expert_checkpoint import write_expert_checkpoint, write_many_tensors

MIB = 2**20
UNIT_BYTES = 300 * 10**6
# Tiny tensors: units that still are many.
MANY_UNIT_BYTES = 20 * 10**6
PEAK_BAR_BYTES = 1536 * MIB
# Growth that counts as flat: below what one more chunk for each worker would take.
FLAT_BAR_BYTES = 32 * MIB


def resident_bytes() -> int:
    """Memory that this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def peak_bytes() -> int:
    """The most memory that this process held. Not getrusage's: that begins with the peak of who started it."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].removesuffix("kB")) * 1024


def measure(source: str, out: str, workers: int, unit_bytes: int) -> None:
    """Compress in this process; print resident bytes after each unit, the peak and memopt's own estimate, as JSON."""
    import memopt
    from memopt.compressor.estimate import estimate

    after_unit: list[int] = []

    def watch(progress: memopt.Progress) -> None:
        if progress.num_done_units > len(after_unit):
            after_unit.append(resident_bytes())

    options = memopt.PlanOptions(max_file_bytes=unit_bytes, tensor_parallel=1)
    memopt.compress(source, out, recipe="glm-5.2-int4", options=options, workers=workers, device="cpu", progress=watch)
    peak = peak_bytes()
    plan = memopt.plan(source, "glm-5.2-int4", options=options)
    estimated = estimate(plan, workers).host_memory_bytes
    found = {"peak": peak, "after_unit": after_unit, "estimated": estimated, "tensors": len(plan.source.tensors)}
    print(json.dumps(found))


def report(what: str, write: Callable[[Path], int], unit_bytes: int, folder: Path | None, workers: int) -> None:
    """Make a checkpoint, compress it in another process, print what that held and whether it is within the bars."""
    with tempfile.TemporaryDirectory(prefix="memopt-memory-", dir=folder) as name:
        source, out = Path(name) / "source", Path(name) / "out"
        size = write(source)
        os.sync()
        command = [
            sys.executable, __file__, "--workers", str(workers), "--measure", str(source), str(out), str(unit_bytes),
        ]  # fmt: skip
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    units, peak = found["after_unit"], found["peak"]
    # The first units warm caches and thread stacks up.
    growth = max(units) - units[len(units) // 4]
    print(
        f"{what}: {size / 2**30:.2f} GiB of FP8 experts in {found['tensors']:,} tensors, {len(units)} units,"
        f" {workers} workers; estimated {found['estimated'] / MIB:,.0f} MiB"
    )
    low, flat = ("PASS" if held else "FAIL" for held in (peak <= PEAK_BAR_BYTES, growth <= FLAT_BAR_BYTES))
    print(f"{low} peak RSS {peak / MIB:,.0f} MiB (wanted: {PEAK_BAR_BYTES / MIB:,.0f} or less)")
    print(
        f"{flat} {units[0] / MIB:,.0f} MiB after the first unit, {units[-1] / MIB:,.0f} after the last, growth past the"
        f" first quarter {growth / MIB:+.1f} MiB (wanted: {FLAT_BAR_BYTES / MIB:.0f} or less)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak host memory of memopt compress, and its growth.")
    parser.add_argument("--gib", type=float, nargs="*", default=[1.0, 8.0], help="GiB of FP8 experts")
    parser.add_argument("--many", action="store_true", help="also 118,629 tiny tensors")
    parser.add_argument("--folder", type=Path, default=None, help="where to work (default: the temporary folder)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--measure", nargs=3, metavar=("SOURCE", "OUT", "UNIT_BYTES"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder, workers = arguments.folder, arguments.workers
    if arguments.measure:
        source, out, unit_bytes = arguments.measure
        measure(source, out, workers, int(unit_bytes))
        return
    for gib in arguments.gib:
        write = partial(write_expert_checkpoint, size_bytes=int(gib * 2**30))
        report(f"{gib:g} GiB", write, UNIT_BYTES, folder, workers)
    if arguments.many:
        report("many tensors", write_many_tensors, MANY_UNIT_BYTES, folder, workers)


if __name__ == "__main__":
    main()
