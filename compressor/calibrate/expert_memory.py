"""How many experts are calibrated at a time: their Hessians, and the work on those that are solved, fit a budget."""

from __future__ import annotations

import torch

from memopt.compressor.calibrate.calibration_run import CalibrationRun
from memopt.compressor.calibrate.layer_targets import ExpertTarget
from memopt.compressor.recipe import Int4Format
from memopt.errors import UsageError
from memopt.kernels.layout import CALIBRATION_CHUNK_TOKENS
from memopt.runtime.model.linear import Linear
from memopt.runtime.model.mlp import GatedMlp

# Of `round_calibrated`, beside its arguments.
SOLVE_BYTES_A_WEIGHT = 24
SOLVE_BYTES_A_HESSIAN_ELEMENT = 50


def experts_at_once(run: CalibrationRun, mlp: GatedMlp, target: ExpertTarget) -> int:
    """Experts of a wave; UsageError if not even one fits, naming what it needs."""
    halves = ((mlp.gate_up, target.gate_up_form), (mlp.down, target.down_form))
    held = max(_held_bytes(linear, form) for linear, form in halves)
    work = run.num_workers * max(_work_bytes(linear, form) for linear, form in halves)
    budget = run.options.memory_bytes
    if work + held > budget:
        raise UsageError(
            f"one expert needs {work + held:,} bytes with {run.num_workers} workers, the budget is {budget:,}",
            remedy=f"use --calibration-memory {-(-(work + held) // 2**20)}MiB or more, or fewer --workers",
        )
    return max(1, (budget - work) // held)


def _held_bytes(linear: Linear, form: Int4Format) -> int:
    """Of one expert's statistics: Hessian, second moments, tokens that wait for a full chunk, and its codes."""
    columns = linear.num_columns
    hessian = columns * columns * torch.float32.itemsize if form.method == "gptq" else 0
    waiting = columns * CALIBRATION_CHUNK_TOKENS * torch.bfloat16.itemsize
    codes = linear.num_rows * columns
    return hessian + waiting + columns * torch.float64.itemsize + codes


def _work_bytes(linear: Linear, form: Int4Format) -> int:
    hessian = linear.num_columns**2 if form.method == "gptq" else 0
    return SOLVE_BYTES_A_WEIGHT * linear.num_rows * linear.num_columns + SOLVE_BYTES_A_HESSIAN_ELEMENT * hessian
