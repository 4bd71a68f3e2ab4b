"""Peak host memory of `memopt compress` at two checkpoint sizes, and its growth from unit to unit.

    python benchmarks/memory.py [--gib 1 8] [--folder DIR] [--workers 2]

Each size runs in a process of its own. Wanted: peak RSS at most 1.5 GiB whatever the size, flat from unit to unit.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from expert_checkpoint import write_expert_checkpoint

MIB = 2**20
UNIT_BYTES = 300 * 10**6


def resident_bytes() -> int:
    """Memory that this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def measure(source: str, out: str, workers: int) -> None:
    """Compress in this process; print resident bytes after each unit and the peak, as JSON."""
    import memopt

    after_unit: list[int] = []

    def watch(progress: memopt.Progress) -> None:
        if progress.num_done_units > len(after_unit):
            after_unit.append(resident_bytes())

    options = memopt.PlanOptions(max_file_bytes=UNIT_BYTES, tensor_parallel=1)
    memopt.compress(source, out, recipe="glm-5.2-int4", options=options, workers=workers, device="cpu", progress=watch)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"peak": peak, "after_unit": after_unit}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, nargs="+", default=[1.0, 8.0])
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--measure", nargs=2, metavar=("SOURCE", "OUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(*arguments.measure, arguments.workers)
        return
    for gib in arguments.gib:
        with tempfile.TemporaryDirectory(prefix="memopt-memory-", dir=arguments.folder) as name:
            source, out = Path(name) / "source", Path(name) / "out"
            size = write_expert_checkpoint(source, int(gib * 2**30))
            os.sync()
            command = [
                sys.executable,
                __file__,
                "--workers",
                str(arguments.workers),
                "--measure",
                str(source),
                str(out),
            ]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            units = found["after_unit"]
            # The first units warm caches and thread stacks up.
            growth = (max(units) - units[len(units) // 4]) / MIB
            print(
                f"{size / 2**30:5.2f} GiB of FP8, {len(units)} units, {arguments.workers} workers:"
                f" peak RSS {found['peak'] / MIB:,.0f} MiB (bar 1,536),"
                f" after first unit {units[0] / MIB:,.0f}, after last {units[-1] / MIB:,.0f} MiB,"
                f" growth past the first quarter {growth:+.1f} MiB"
            )


if __name__ == "__main__":
    main()
