"""Calibration of a layer's routed experts, as many at a time as their Hessians fit the memory budget.

A rank has a contiguous share of the experts. It reads the rows of all samples, finds its experts' tokens with the
router, which is never quantized, and sums them in the order of the samples: no token travels between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from memopt.compressor.calibrate.calibration_run import CalibrationRun, share
from memopt.compressor.calibrate.expert_memory import expert_memory
from memopt.compressor.calibrate.forced_routing import forced_rows, without_own
from memopt.compressor.calibrate.layer_places import weight_of
from memopt.compressor.calibrate.layer_targets import ExpertTarget
from memopt.compressor.calibrate.module_statistics import ModuleStatistics, StatisticsCollector
from memopt.compressor.calibrate.ordered_map import ordered_map
from memopt.compressor.calibrate.row_file import RowFile
from memopt.compressor.calibrate.solved_weights import (
    SolvedWeight,
    StoredPart,
    loaded,
    round_plainly,
    solve,
    stored_parts,
)
from memopt.compressor.calibration_figures import CalibrationFigures
from memopt.compressor.evaluate.window_rows import WindowBatch
from memopt.compressor.recipe import Int4Format
from memopt.compressor.tensor_plan import TensorPlan
from memopt.errors import UnsupportedError
from memopt.kernels.gemm.int4_weight import Int4Weight
from memopt.kernels.gemm.silu_mul import silu_mul
from memopt.runtime.model.decoder_layer import DecoderLayer
from memopt.runtime.model.experts import Int4Experts, MlpExperts
from memopt.runtime.model.linear import Linear
from memopt.runtime.model.moe import MoeBlock
from memopt.runtime.model.norms import rms_norm
from memopt.runtime.weights.linear_builder import int4_form

# Rows of the layer from which its own Hessian is made, for experts that shrink toward it.
LAYER_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """What experts of a wave multiply in one batch: rows in BF16, as statistics take them, by expert; who was chosen.

    `counts` int64 [E]: tokens of all experts of the layer.
    """

    rows: dict[int, Tensor]
    counts: Tensor


class ExpertCalibration:
    """Calibrates the routed experts of layer `number`; `attended`: rows behind its attention, of all samples."""

    def __init__(
        self, run: CalibrationRun, number: int, layer: DecoderLayer, target: ExpertTarget, attended: RowFile
    ) -> None:
        """Raises UnsupportedError for experts that are not stored one by one in FP8 or BF16."""
        if not isinstance(layer.mlp, MoeBlock) or not isinstance(layer.mlp.experts, MlpExperts):
            raise UnsupportedError(f"layer {number} has no experts that calibration can round")
        self._run = run
        self._number = number
        self._layer = layer
        self._moe = layer.mlp
        self._mlps = layer.mlp.experts.mlps
        self._target = target
        self._attended = attended
        self._forced: dict[int, Tensor] = {}

    def labels(self) -> list[str]:
        """Of all parts of all ranks."""
        return [label for rank in range(self._run.communicator.num_ranks) for label in self._labels_of(rank)]

    def calibrate(self) -> None:
        """Solve this rank's experts, wave after wave, and store them."""
        for wave in self._waves(self._run.rank):
            self._calibrate_wave(wave)
            self._forced = {}

    def _calibrate_wave(self, wave: range) -> None:
        """A function of its own, so that nothing of a wave is left when the next one starts."""
        gate_up = self._solve_gate_up(wave)
        down = self._solve_down(wave, gate_up)
        tensors: list[StoredPart] = []
        figures: dict[str, CalibrationFigures] = {}
        for expert, first, second in zip(wave, gate_up, down, strict=True):
            for solved, weights in ((first, self._target.gate_up[expert]), (second, (self._target.down[expert],))):
                tensors += stored_parts(solved, weights)
                if solved.figures is not None:
                    figures |= {plan.source.spec.name: solved.figures for plan in weights}
        self._run.store.write_part(self._number, _label(wave), tensors, figures)

    def quantized(self) -> Int4Experts:
        """All experts of all ranks, from the store."""
        for label in self.labels():
            self._run.store.open_part(self._number, label)
        gate_up = self._stack(self._target.gate_up, self._target.gate_up_form)
        down = self._stack([(plan,) for plan in self._target.down], self._target.down_form)
        return Int4Experts(int4_form(gate_up, self._run.load), int4_form(down, self._run.load))

    def _waves(self, rank: int) -> Iterator[range]:
        num_experts = len(self._mlps)
        own = share(num_experts, rank, self._run.communicator.num_ranks)
        sizes = self._run.sizes
        step = expert_memory(sizes, self._target).experts_at_once(sizes.memory_bytes)
        for first in range(own.start, own.stop, step):
            yield range(first, min(first + step, own.stop))

    def _labels_of(self, rank: int) -> list[str]:
        return [_label(wave) for wave in self._waves(rank)]

    def _solve_gate_up(self, wave: range) -> list[SolvedWeight]:
        form = self._target.gate_up_form
        linears = [self._mlps[expert].gate_up for expert in wave]
        if not form.is_calibrated:
            return self._solve(wave, linears, form, None, None)
        statistics = self._collect(wave, form, lambda _, rows: rows)
        broad = self._layer_statistics(form) if self._forced else None
        return self._solve(wave, linears, form, statistics, broad)

    def _solve_down(self, wave: range, gate_up: Sequence[SolvedWeight]) -> list[SolvedWeight]:
        form = self._target.down_form
        linears = [self._mlps[expert].down for expert in wave]
        if not form.is_calibrated:
            return self._solve(wave, linears, form, None, None)
        quantized = {expert: solved.linear(self._run.load) for expert, solved in zip(wave, gate_up, strict=True)}

        def hidden(expert: int, rows: Tensor) -> Tensor:
            if not len(rows):
                return rows.new_empty(0, self._mlps[expert].down.num_columns)
            return silu_mul(quantized[expert](rows), rows.dtype)

        return self._solve(wave, linears, form, self._collect(wave, form, hidden), None)

    def _solve(
        self,
        wave: range,
        linears: Sequence[Linear],
        form: Int4Format,
        statistics: Sequence[ModuleStatistics] | None,
        broad: ModuleStatistics | None,
    ) -> list[SolvedWeight]:
        def one(place: int) -> SolvedWeight:
            weight = weight_of(linears[place])
            if statistics is None:
                return round_plainly(weight, form)
            num_forced = len(self._forced.get(wave[place], ()))
            options = self._run.rounding
            if num_forced:
                options = replace(options, shrinkage_tokens=float(self._run.options.coverage_tokens))
            return solve(
                weight,
                statistics[place],
                form,
                options,
                num_forced_tokens=num_forced,
                layer=broad if num_forced else None,
            )

        return list(self._run.pool.map(one, range(len(wave))))

    def _collect(
        self, wave: range, form: Int4Format, inputs_of: Callable[[int, Tensor], Tensor]
    ) -> list[ModuleStatistics]:
        """Statistics of what each expert of `wave` multiplies: `inputs_of` its rows, forced ones last, which are kept
        in `_forced`.
        """
        run = self._run

        def of_batch(batch: WindowBatch) -> ExpertRows:
            return self._rows_of(batch, wave, inputs_of)

        def add(expert: int, rows: Tensor) -> None:
            collectors[expert].add(rows)

        def add_forced(expert: int) -> None:
            add(expert, inputs_of(expert, self._normed(self._forced[expert])).to(torch.bfloat16))

        collectors: dict[int, StatisticsCollector] = {}
        counts = torch.zeros(len(self._mlps), dtype=torch.int64)
        for found in ordered_map(run.pool, of_batch, run.batches, run.ahead):
            counts += found.counts
            for expert, rows in found.rows.items():
                if expert not in collectors:
                    collectors[expert] = self._collector(rows.shape[1], form)
            list(run.pool.map(add, found.rows, found.rows.values()))
        # Those of gate and up's pass are the same, and would lie beside these.
        self._forced = {}
        self._forced = self._choose_forced(wave, counts)
        list(run.pool.map(add_forced, self._forced))
        return [collectors[expert].finish() for expert in wave]

    def _rows_of(self, batch: WindowBatch, wave: range, inputs_of: Callable[[int, Tensor], Tensor]) -> ExpertRows:
        """`inputs_of` the normed rows of each expert of `wave`, one expert after the other."""
        x = self._normed(self._attended.read(batch.first_row, batch.num_rows))
        ids = self._moe.routing(x).expert_ids
        counts = torch.bincount(ids.flatten(), minlength=len(self._mlps)).cpu()
        rows = {expert: inputs_of(expert, x[(ids == expert).any(dim=1)]).to(torch.bfloat16) for expert in wave}
        return ExpertRows(rows, counts)

    def _normed(self, rows: Tensor) -> Tensor:
        return rms_norm(rows.to(self._run.load.device), self._layer.post_norm, self._layer.eps)

    def _choose_forced(self, wave: range, counts: Tensor) -> dict[int, Tensor]:
        """Rows of other experts' tokens for those of `wave` that have too few, by expert."""
        found: dict[int, Tensor] = {}
        for expert in wave:
            num_wanted = self._run.options.coverage_tokens - int(counts[expert])
            numbers = forced_rows(expert, num_wanted, self._run.num_rows)
            if len(numbers):
                rows = self._attended.read_rows(numbers)
                ids = self._moe.routing(self._normed(rows)).expert_ids.cpu()
                chosen = rows[without_own(ids, expert, num_wanted)]
                if len(chosen):
                    found[expert] = chosen
        return found

    def _layer_statistics(self, form: Int4Format) -> ModuleStatistics:
        """Of evenly spaced rows of the layer's input, whatever expert they chose."""
        count = min(LAYER_ROWS, self._run.num_rows)
        numbers = torch.arange(count) * self._run.num_rows // count
        collector = self._collector(self._attended.num_columns, form)
        for part in torch.split(numbers, self._run.options.batch_tokens):
            collector.add(self._normed(self._attended.read_rows(part)).to(torch.bfloat16))
        return collector.finish()

    def _collector(self, num_columns: int, form: Int4Format) -> StatisticsCollector:
        return StatisticsCollector(1, num_columns, with_hessian=form.method == "gptq", device=self._run.load.device)

    def _stack(self, weights: Sequence[Sequence[TensorPlan]], form: Int4Format) -> Int4Weight:
        read, device = self._run.store.read, self._run.load.device

        def of_expert(plans: Sequence[TensorPlan]) -> tuple[Tensor, Tensor]:
            return loaded([(read(plan.outputs[0].name), read(plan.outputs[1].name)) for plan in plans], plans)

        # Filled in place: a list of all experts would be a second copy of the stack.
        packed, scale = (
            torch.empty(len(weights), *part.shape, dtype=part.dtype, device=device) for part in of_expert(weights[0])
        )
        for number, plans in enumerate(weights):
            packed[number], scale[number] = of_expert(plans)
        return Int4Weight(packed, scale, form.weights_per_scale)


def _label(wave: range) -> str:
    return f"experts-{wave.start:05d}-{wave.stop:05d}"
