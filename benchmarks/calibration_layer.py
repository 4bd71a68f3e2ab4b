"""CPU seconds of the parts of a GLM-5.2 layer's calibration, one expert of it: Hessian, solve, weighted rounding.

    python -m benchmarks.calibration_layer [--columns 6144] [--rows 4096]

On one thread, in CPU time, so that a busy machine does not show. Prints JSON; docs/scale.md multiplies it out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

from memopt.compressor.calibrate.calibrated_rounding import round_calibrated
from memopt.compressor.calibrate.module_statistics import StatisticsCollector
from memopt.compressor.recipe import Int4Format
from memopt.kernels.gemm.row_tiles import tiled_matmul
from memopt.kernels.layout import CALIBRATION_CHUNK_TOKENS

SEED = 0


def cpu_seconds(work: Callable[[], object]) -> float:
    """Of one call, after none: compilation of small kernels is done by the caller."""
    started = time.process_time()
    work()
    return time.process_time() - started


def measure(num_rows: int, num_columns: int) -> dict[str, float]:
    """Of a weight [num_rows, num_columns] whose inputs have a spectrum that falls, as real ones have."""
    generator = torch.Generator().manual_seed(SEED)
    weight = torch.randn(1, num_rows, num_columns, generator=generator) * 0.02
    spread = torch.linspace(0, 4, num_columns).exp_().neg_().add_(60).log_()
    tokens = (torch.randn(CALIBRATION_CHUNK_TOKENS, num_columns, generator=generator) * spread).to(torch.bfloat16)
    collector = StatisticsCollector(1, num_columns, with_hessian=True)
    found = {"hessian_chunk": cpu_seconds(lambda: collector.add(tokens))}
    moments = StatisticsCollector(1, num_columns, with_hessian=False)
    found["second_moment_chunk"] = cpu_seconds(lambda: moments.add(tokens))
    statistics = collector.finish()
    for method in ("weighted", "gptq"):
        form = Int4Format(type="int4", method=method)  # type: ignore[arg-type]
        found[method] = cpu_seconds(lambda form=form: round_calibrated(weight, statistics, form))  # type: ignore[misc]
    x = tokens.to(torch.float32)
    found["forward_chunk"] = cpu_seconds(lambda: tiled_matmul(x, weight[0]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=6144)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # Compiles what numba compiles.
    measure(128, 128)
    seconds = measure(arguments.rows, arguments.columns)
    shape = {"rows": arguments.rows, "columns": arguments.columns, "chunk_tokens": CALIBRATION_CHUNK_TOKENS}
    print(json.dumps(shape | {name: round(value, 3) for name, value in seconds.items()}))


if __name__ == "__main__":
    main()
