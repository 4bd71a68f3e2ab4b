"""How long a plan takes and how much host memory, before it runs."""

from __future__ import annotations

from dataclasses import dataclass

from memopt.compressor.plan import Plan
from memopt.compressor.quantize.backend import CPU_CHUNK_BYTES
from memopt.compressor.tensor_plan import Fate, TensorPlan

# Source bytes a second and core, end to end, measured by `make bench` on an EPYC with AVX-512 (docs/benchmarks.md).
ROUNDING_BYTES_PER_SECOND = {"absmax": 0.44e9, "mse": 0.22e9, "mse-signed": 0.19e9}
STREAMING_BYTES_PER_SECOND = 0.8e9
# Bytes of rank files a second and core: slices are copied, hashed and written beside the hub file (1.0 and 0.94 GB/s,
# eight ranks in memory, INT4 and copied FP8).
RANK_BYTES_PER_SECOND = 0.9e9
# The interpreter with numpy and numba while it compiles, and what one worker holds besides a tensor's scales.
BASE_MEMORY_BYTES = 300 * 2**20
# Plan, header tables and ledger grow with the number of tensors (benchmarks/memory.py --many: 3,500 bytes each).
TENSOR_TABLE_BYTES = 5_000
WORKER_CHUNKS = 8


@dataclass(frozen=True)
class Estimate:
    """`seconds` of work with `workers` cores, disks willing; `host_memory_bytes` the expected peak."""

    seconds: float
    workers: int
    host_memory_bytes: int


def _seconds_on_one_core(tensor: TensorPlan) -> float:
    size = tensor.source.size_bytes
    if tensor.fate is Fate.QUANTIZED and tensor.int4 is not None:
        weights = tensor.source.weight.shape[0] * tensor.source.weight.shape[1]
        return weights / ROUNDING_BYTES_PER_SECOND[tensor.int4.scale]
    return size / STREAMING_BYTES_PER_SECOND


def _held_bytes(tensor: TensorPlan) -> int:
    """What waits in memory while a tensor streams: its scales in and out."""
    waiting = sum(output.size_bytes for output in tensor.outputs[1:])
    return waiting + sum(part.size_bytes for part in tensor.source.parts[1:])


def estimate(plan: Plan, workers: int) -> Estimate:
    """Time and memory for `plan` on the CPU with `workers` threads."""
    seconds = sum(_seconds_on_one_core(tensor) for tensor in plan.tensors)
    rank_bytes = sum(file.data_size_bytes for unit in plan.units for file in unit.rank_files)
    seconds += rank_bytes / RANK_BYTES_PER_SECOND
    held = max((_held_bytes(tensor) for tensor in plan.tensors), default=0)
    tables = TENSOR_TABLE_BYTES * len(plan.tensors)
    memory = BASE_MEMORY_BYTES + tables + workers * (WORKER_CHUNKS * CPU_CHUNK_BYTES + held)
    return Estimate(seconds / max(workers, 1), workers, memory)
