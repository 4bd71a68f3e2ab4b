"""KL and top-1 agreement of quantized KV caches against a bf16 one: `python -m benchmarks.kv_quality.main`.

    python -m benchmarks.kv_quality.main [--models tiny-glm5 smollm2] [--processes 2] [--write docs/kv-quality.md]

Two models, as signed INT4 releases, read documents that they never saw, in turns of one conversation: each turn's
prompt goes on where the one before ended, over its cached pages, and its answer is forced to be the document's tokens.
Computed in float32, in which one shot, chunks and turns must agree to the bit, or the run ends with an error. So all
differences are the cache's. No random number is used. SmolLM2 needs three packages of PyPI (build/smollm2 keeps them).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.kv_quality.forced_run import DifferentBitsError, TurnPlan
from benchmarks.kv_quality.measure import MeasurePlan, measure
from benchmarks.kv_quality.proof_models import ProofModel, smollm2, tiny_glm5
from benchmarks.kv_quality.tables import markdown, write_into
from memopt.errors import MemoptError

ENDS = (256, 1024, 4096)
# 32 of an answer's tokens are computed as decode rows; prompts then do not end with a page.
ANSWER_TOKENS = 33
TURNS = TurnPlan(ENDS, ANSWER_TOKENS, chunk_rows=448, reuses_pages=True)
# In other modes SmolLM2 is run to the second turn only: all of it would take half of the time.
MODELS: dict[str, tuple[Callable[[Path, Sequence[int]], ProofModel], MeasurePlan]] = {
    "tiny-glm5": (tiny_glm5, MeasurePlan(TURNS, ENDS[-1])),
    "smollm2": (smollm2, MeasurePlan(TURNS, ENDS[1])),
}


def main() -> None:
    """Measure the chosen models one after the other; print each one's tables, and write them where they belong."""
    parser = argparse.ArgumentParser(description="Quality of quantized KV caches.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--processes", type=int, default=min(len(os.sched_getaffinity(0)), 4), help="one thread each")
    parser.add_argument("--write", type=Path, help="a document with markers for each model")
    arguments = parser.parse_args()
    # Inherited by the processes: they share the cores.
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in arguments.models:
        prepare, plan = MODELS[name]
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            try:
                result = measure(prepare(Path(scratch), plan.turns.ends), plan, arguments.processes)
            except (MemoptError, DifferentBitsError) as problem:
                sys.exit(f"{name}: {problem}")
        tables = markdown(result)
        print(f"{name}\n{tables}\n")
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
        if arguments.write is not None:
            write_into(arguments.write, name, tables)


if __name__ == "__main__":
    main()
