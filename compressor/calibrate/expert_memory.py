"""How many experts are calibrated at a time: all that a wave of them takes fits the budget, rows in flight included.

Beside the budget are the layer as stored and what its attention and its finished MLP take (docs/calibration.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from memopt.compressor.calibrate.forced_routing import CANDIDATES_A_ROW
from memopt.compressor.calibrate.layer_targets import DenseTarget, ExpertTarget, LayerTargets
from memopt.compressor.calibrate.module_memory import ModuleMemory
from memopt.compressor.calibrate.run_sizes import RESULTS_AHEAD, RunSizes
from memopt.compressor.recipe import Int4Format
from memopt.compressor.tensor_plan import TensorPlan
from memopt.errors import UsageError
from memopt.kernels.gemm.int4_gemm_cpu import TILE_WEIGHTS

# Bytes while a batch's rows become what an expert multiplies, if one expert gets all of them: for each element of a
# row of the layer (normed, picked, padded, split for the INT4 product), of the router's scores, and of the expert's
# hidden values (gate and up, twice).
RUN_BYTES_A_ROW_ELEMENT = 4 * torch.float32.itemsize
RUN_BYTES_A_SCORE = 3 * torch.float32.itemsize
RUN_BYTES_A_HIDDEN_ELEMENT = 4 * torch.float32.itemsize
# The INT4 form that a GPU multiplies lies beside the one that is stored.
NUM_CODE_FORMS = 2


@dataclass(frozen=True, slots=True)
class ExpertMemory:
    """Of a layer's routed experts: `batch_tokens` rows run at a time, on `num_workers` threads, `num_waiting` results
    of which may be there besides those that run.

    `forced_tokens`: the most that an expert gets of others (`--coverage-tokens`).
    """

    gate_up: ModuleMemory
    down: ModuleMemory
    num_experts: int
    experts_per_token: int
    batch_tokens: int
    forced_tokens: int
    num_workers: int
    num_waiting: int

    def wave_bytes(self, num_experts: int) -> int:
        """The most that `num_experts` at a time take, whatever the router chooses: collecting or rounding."""
        gate_up, down = self.gate_up, self.down
        hidden = gate_up.num_columns
        forced = self.forced_tokens * hidden * torch.float32.itemsize
        done = NUM_CODE_FORMS * gate_up.codes_bytes
        # The layer's own statistics, beside the experts', for those that got tokens of others.
        broad = gate_up.statistics_bytes
        peak = max(
            num_experts * gate_up.statistics_bytes + self._collect_bytes(gate_up, num_experts),
            num_experts * gate_up.statistics_bytes + broad + self._broad_bytes(),
            num_experts * (gate_up.statistics_bytes + gate_up.codes_bytes)
            + broad
            + self.num_workers * gate_up.solve_bytes,
            num_experts * (done + down.statistics_bytes) + self._collect_bytes(down, num_experts),
            num_experts * (done + down.statistics_bytes + down.codes_bytes) + self.num_workers * down.solve_bytes,
        )
        return num_experts * forced + peak

    def experts_at_once(self, budget_bytes: int) -> int:
        """Experts of a wave, at most all of them. UsageError if not even one fits, naming what it needs."""
        least = self.wave_bytes(1)
        if least > budget_bytes:
            raise _too_small("one expert", least, budget_bytes, f" with {self.num_workers} workers")
        return max(count for count in range(1, self.num_experts + 1) if self.wave_bytes(count) <= budget_bytes)

    def _collect_bytes(self, module: ModuleMemory, num_experts: int) -> int:
        """While batches run through the router, and for down through gate and up, and statistics take the rows."""
        if not (self.gate_up.form.is_calibrated or self.down.form.is_calibrated):
            return 0
        row = RUN_BYTES_A_ROW_ELEMENT * self.gate_up.num_columns + RUN_BYTES_A_SCORE * self.num_experts
        tile = 0
        if module is self.down:
            row += RUN_BYTES_A_HIDDEN_ELEMENT * module.num_columns
            tile = torch.float32.itemsize * min(TILE_WEIGHTS, self.gate_up.num_rows * self.gate_up.num_columns)
        # Batches; or what an expert that needs tokens of others may take, looked at by one thread.
        num_running = max(self.num_workers * max(self.batch_tokens, self.forced_tokens), self._num_candidates)
        running = row * num_running + self.num_workers * tile
        if not module.form.is_calibrated:
            return running
        # A token has so many different experts of the wave at most, and an expert every token of a batch.
        num_chosen = min(self.experts_per_token, num_experts)
        results = (self.num_workers + self.num_waiting) * module.input_bytes(num_chosen * self.batch_tokens)
        num_adding = min(self.num_workers, num_experts)
        adding = module.add_bytes(min(num_adding, num_chosen) * self.batch_tokens, num_adding)
        all_inputs = num_chosen * module.most_tokens + num_experts * self.forced_tokens
        waiting = min(num_experts * module.waiting_bytes, module.input_bytes(all_inputs))
        return waiting + running + results + adding

    @property
    def _num_candidates(self) -> int:
        return CANDIDATES_A_ROW * self.forced_tokens

    def _broad_bytes(self) -> int:
        """While rows of the layer, whatever expert they chose, are added to its own statistics."""
        rows = self.batch_tokens * RUN_BYTES_A_ROW_ELEMENT * self.gate_up.num_columns
        return self.gate_up.waiting_bytes + rows + self.gate_up.add_bytes(self.batch_tokens)


def expert_memory(sizes: RunSizes, target: ExpertTarget) -> ExpertMemory:
    """Of the experts of `target` in a run of these `sizes`."""
    return ExpertMemory(
        _module(sizes, target.gate_up[0], target.gate_up_form),
        _module(sizes, target.down[:1], target.down_form),
        len(target.down),
        sizes.experts_per_token,
        sizes.batch_tokens,
        sizes.forced_tokens,
        sizes.num_workers,
        # One more is in the hands of the consumer.
        RESULTS_AHEAD + 1,
    )


def require_calibration_memory(sizes: RunSizes, targets: Iterable[LayerTargets]) -> None:
    """UsageError unless every wave of one expert and every dense module fits `sizes.memory_bytes`."""
    for layer in targets:
        for target in layer.dense:
            _require_dense(sizes, target)
        if layer.experts is not None:
            expert_memory(sizes, layer.experts).experts_at_once(sizes.memory_bytes)


def _require_dense(sizes: RunSizes, target: DenseTarget) -> None:
    if not target.form.is_calibrated:
        return
    needed = _module(sizes, target.weights, target.form).alone_bytes(sizes.batch_tokens)
    if needed > sizes.memory_bytes:
        raise _too_small(target.weights[0].source.spec.name, needed, sizes.memory_bytes)


def _module(sizes: RunSizes, weights: Sequence[TensorPlan], form: Int4Format) -> ModuleMemory:
    """Of weights whose rows lie below each other."""
    shapes = [plan.source.spec.shape for plan in weights]
    # Each of the samples' tokens, and those that it gets for coverage, which are other ones.
    return ModuleMemory(sum(shape[0] for shape in shapes), shapes[0][1], form, sizes.num_rows)


def _too_small(what: str, needed_bytes: int, budget_bytes: int, condition: str = "") -> UsageError:
    remedy = f"use --calibration-memory {-(-needed_bytes // 2**20)}MiB or more"
    return UsageError(
        f"{what} needs {needed_bytes:,} bytes{condition}, the budget is {budget_bytes:,}",
        remedy=f"{remedy}, or fewer --workers" if condition else remedy,
    )
