"""Bounds of a module's memory hold, and are not far above what torch's allocator says."""

from __future__ import annotations

import pytest
import torch
from allocator_peak import allocator_peak_bytes

from memopt.compressor.calibrate.expert_rounding import RoundingOptions
from memopt.compressor.calibrate.layer_places import weight_of
from memopt.compressor.calibrate.module_memory import ModuleMemory
from memopt.compressor.calibrate.module_statistics import ModuleStatistics, StatisticsCollector
from memopt.compressor.calibrate.solved_weights import SolvedWeight, solve
from memopt.compressor.recipe import GroupSize, Int4Format
from memopt.kernels.layout import FP8_BLOCK_COLUMNS, FP8_BLOCK_ROWS
from memopt.runtime.weights.linears import Fp8BlockLinear, StackedLinear

NUM_TOKENS = 1500
# Tokens that come together.
BATCH_TOKENS = 600
SHAPES = ((1024, 128), (512, 512), (128, 256), (128, 1024))
METHODS = ("weighted", "gptq")


def gate_and_up(num_rows: int, num_columns: int) -> StackedLinear:
    """Two FP8 weights of one input, `num_rows` together."""
    generator = torch.Generator().manual_seed(0)
    half = (num_rows // 2, num_columns)
    scales = (-(-half[0] // FP8_BLOCK_ROWS), -(-half[1] // FP8_BLOCK_COLUMNS))
    parts = [
        Fp8BlockLinear(
            torch.randn(half, generator=generator).to(torch.float8_e4m3fn),
            torch.rand(scales, generator=generator) + 0.5,
            (FP8_BLOCK_ROWS, FP8_BLOCK_COLUMNS),
        )
        for _ in range(2)
    ]
    return StackedLinear(tuple(parts))


def collected(num_columns: int, method: str) -> StatisticsCollector:
    generator = torch.Generator().manual_seed(1)
    collector = StatisticsCollector(1, num_columns, with_hessian=method == "gptq")
    for first in range(0, NUM_TOKENS, BATCH_TOKENS):
        rows = torch.randn(min(BATCH_TOKENS, NUM_TOKENS - first), num_columns, generator=generator)
        collector.add(rows.to(torch.bfloat16))
    return collector


def form_of(method: str, group_size: GroupSize = 32) -> Int4Format:
    return Int4Format.model_validate({"type": "int4", "method": method, "group_size": group_size})


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES)
def test_solve_bytes_hold_and_are_near(shape: tuple[int, int], method: str) -> None:
    linear, statistics = gate_and_up(*shape), collected(shape[1], method).finish()
    memory = ModuleMemory(*shape, form_of(method), NUM_TOKENS)
    # Shrinking makes a second Hessian: the most that a solve does.
    options = RoundingOptions(shrinkage_tokens=64.0)

    def one() -> SolvedWeight:
        return solve(weight_of(linear), statistics, memory.form, options)

    one()
    peak = allocator_peak_bytes(one)
    assert 0.8 * memory.solve_bytes < peak <= memory.solve_bytes


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_columns", [256, 1024])
def test_statistics_hold_and_are_near(num_columns: int, method: str) -> None:
    memory = ModuleMemory(num_columns, num_columns, form_of(method), NUM_TOKENS)

    def all_of_it() -> ModuleStatistics:
        return collected(num_columns, method).finish()

    batch_bytes = BATCH_TOKENS * num_columns * (torch.float32.itemsize + torch.bfloat16.itemsize)
    peak = allocator_peak_bytes(all_of_it) - batch_bytes
    bound = memory.statistics_bytes + memory.waiting_bytes + memory.add_bytes(BATCH_TOKENS)
    assert 0.6 * bound < peak <= bound


@pytest.mark.parametrize("group_size", [32, 128, "channel"])
def test_codes_bytes_are_those_of_a_solved_weight(group_size: GroupSize) -> None:
    memory = ModuleMemory(128, 256, form_of("weighted", group_size), NUM_TOKENS)
    solved = solve(
        weight_of(gate_and_up(128, 256)), collected(256, "weighted").finish(), memory.form, RoundingOptions()
    )
    assert memory.codes_bytes == solved.packed.nbytes + solved.scale.nbytes
