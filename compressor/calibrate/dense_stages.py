"""Calibration of a layer's dense projections: attention, shared experts, dense MLPs.

Stage after stage, so that each sees inputs from projections that are quantized already. The projections of a stage
share one input, and so one Hessian. Ranks put the inputs of their samples into one file; one of them sums it in the
order of the samples, and solves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from memopt.compressor.calibrate.calibration_run import CalibrationRun
from memopt.compressor.calibrate.layer_places import RecordedLinear, bias_of, linear_at, weight_of, with_linear
from memopt.compressor.calibrate.layer_targets import DenseTarget
from memopt.compressor.calibrate.module_statistics import ModuleStatistics, StatisticsCollector
from memopt.compressor.calibrate.row_file import RowFile
from memopt.compressor.calibrate.solved_weights import SolvedWeight, loaded, round_plainly, solve, stored_parts
from memopt.compressor.calibration_store import remove_quietly
from memopt.compressor.evaluate.window_rows import WindowBatch
from memopt.runtime.model.decoder_layer import DecoderLayer

INPUTS_NAME = "inputs"
# Runs this rank's batches through the layer; `prepare` swaps a projection for one that records.
RunBatches = Callable[[DecoderLayer, Callable[[DecoderLayer, WindowBatch], DecoderLayer]], None]


def calibrate_stage(
    run: CalibrationRun, number: int, layer: DecoderLayer, targets: Sequence[DenseTarget], run_batches: RunBatches
) -> tuple[DecoderLayer, list[str]]:
    """The layer with the projections `targets` of one stage quantized, and the labels of the parts that were stored."""
    calibrated = [target for target in targets if target.form.is_calibrated]
    if calibrated:
        place = calibrated[0].place
        columns = linear_at(layer, place).num_columns
        name = f"{INPUTS_NAME}-{number:05d}-{calibrated[0].stage}"
        with run.rows(name, columns, torch.bfloat16) as inputs:
            run_batches(layer, _recorder(place, inputs))
            inputs.sync()
            run.barrier()
            if run.rank == targets[0].stage % run.communicator.num_ranks:
                _solve(run, number, layer, calibrated, inputs)
            run.barrier()
        if run.rank == 0:
            remove_quietly(inputs.path)
    labels: list[str] = []
    for target in targets:
        linear = linear_at(layer, target.place)
        if target.form.is_calibrated:
            run.store.open_part(number, target.label)
            labels.append(target.label)
            solved = _from_store(run, target)
        else:
            solved = round_plainly(weight_of(linear), target.form)
        layer = with_linear(layer, target.place, solved.linear(run.load, bias_of(linear)))
    return layer, labels


def _recorder(place: tuple[str, ...], inputs: RowFile) -> Callable[[DecoderLayer, WindowBatch], DecoderLayer]:
    def prepare(layer: DecoderLayer, batch: WindowBatch) -> DecoderLayer:
        def record(x: Tensor) -> None:
            inputs.write(batch.first_row, x)

        return with_linear(layer, place, RecordedLinear(linear_at(layer, place), record))

    return prepare


def _solve(
    run: CalibrationRun, number: int, layer: DecoderLayer, targets: Sequence[DenseTarget], inputs: RowFile
) -> None:
    has_hessian = any(target.form.method == "gptq" for target in targets)
    collector = StatisticsCollector(1, inputs.num_columns, with_hessian=has_hessian, device=run.load.device)
    for chunk in run.chunks(inputs):
        collector.add(chunk.to(run.load.device))
    statistics: ModuleStatistics = collector.finish()
    for target in targets:
        weight = weight_of(linear_at(layer, target.place))
        solved = solve(weight, statistics, target.form, replace(run.rounding, min_tokens=1))
        figures = {plan.source.spec.name: solved.figures for plan in target.weights if solved.figures is not None}
        run.store.write_part(number, target.label, stored_parts(solved, target.weights), figures)


def _from_store(run: CalibrationRun, target: DenseTarget) -> SolvedWeight:
    parts = [(run.store.read(plan.outputs[0].name), run.store.read(plan.outputs[1].name)) for plan in target.weights]
    packed, scale = loaded(parts, target.weights)
    device = run.load.device
    return SolvedWeight(packed.to(device), scale.to(device), target.form, None)
