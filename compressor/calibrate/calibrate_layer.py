"""One layer: its projections quantized stage by stage, then all samples through what the release will have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from memopt.compressor.calibrate.attention_pass import AttentionPass
from memopt.compressor.calibrate.calibration_run import CalibrationRun
from memopt.compressor.calibrate.dense_stages import calibrate_stage
from memopt.compressor.calibrate.expert_waves import ExpertCalibration
from memopt.compressor.calibrate.layer_targets import NUM_ATTENTION_STAGES, DenseTarget, LayerTargets
from memopt.compressor.calibrate.ordered_map import ordered_map
from memopt.compressor.calibrate.row_file import RowFile
from memopt.compressor.evaluate.window_rows import WindowBatch
from memopt.runtime.kv.kv_range import KvRange
from memopt.runtime.model.decoder_layer import DecoderLayer
from memopt.runtime.model.mlp import GatedMlp
from memopt.runtime.model.moe import MoeBlock
from memopt.runtime.model.norms import rms_norm


@dataclass(frozen=True, slots=True)
class LayerRows:
    """The files of one layer: `hidden` comes in, `attended` stands behind attention, `out` goes to the next layer.

    `selection_in`, `selection_out`: of sparse attention; `out` None where no layer follows that needs it,
    `selection_out` where the next one makes its own.
    """

    hidden: RowFile
    attended: RowFile
    out: RowFile | None
    selection_in: RowFile | None
    selection_out: Callable[[int], RowFile] | None


@dataclass(frozen=True, slots=True)
class CalibratedLayer:
    """`labels`: its parts in the store. `ranges`: what this rank's samples stored in the KV cache.

    `selection_columns`: of the rows that were written to `selection_out`; 0 for none.
    """

    labels: tuple[str, ...]
    ranges: tuple[KvRange, ...]
    selection_columns: int


def calibrate_layer(
    run: CalibrationRun, number: int, layer: DecoderLayer, targets: LayerTargets, rows: LayerRows
) -> CalibratedLayer:
    """Quantize `targets` of `layer`, store them, and run this rank's samples through the result.

    All ranks call it together; it returns when this rank's rows are written, the others' may not be.
    """
    labels: list[str] = []
    attention = AttentionPass(run, number, rows.hidden, rows.selection_in)

    def run_attention(part: DecoderLayer, prepare: Callable[[DecoderLayer, WindowBatch], DecoderLayer]) -> None:
        for _ in attention.outputs(part, prepare):
            pass

    def run_mlp(part: DecoderLayer, prepare: Callable[[DecoderLayer, WindowBatch], DecoderLayer]) -> None:
        def one(batch: WindowBatch) -> None:
            _dense_mlp(prepare(part, batch))(_normed(run, part, rows.attended, batch))

        for _ in ordered_map(run.pool, one, run.own_batches, run.ahead):
            pass

    stages = sorted({target.stage for target in targets.dense})
    for stage in (stage for stage in stages if stage < NUM_ATTENTION_STAGES):
        layer, found = calibrate_stage(run, number, layer, _of_stage(targets, stage), run_attention)
        labels += found
    attention.forget_ranges()
    selection_columns = _attend(run, layer, attention, rows)
    # A rank may have no samples, and then no selection; also, all rows are there now.
    selection_columns = int(run.communicator.maximum(torch.tensor([selection_columns])))
    for stage in (stage for stage in stages if stage >= NUM_ATTENTION_STAGES):
        layer, found = calibrate_stage(run, number, layer, _of_stage(targets, stage), run_mlp)
        labels += found
    experts_matter = targets.experts is not None and (targets.experts.is_calibrated or rows.out is not None)
    if experts_matter and targets.experts is not None and isinstance(layer.mlp, MoeBlock):
        experts = ExpertCalibration(run, number, layer, targets.experts, rows.attended)
        experts.calibrate()
        run.barrier()
        labels += experts.labels()
        if rows.out is not None:
            layer = replace(layer, mlp=replace(layer.mlp, experts=experts.quantized()))
    if rows.out is not None:
        _propagate(run, layer, rows.attended, rows.out)
    return CalibratedLayer(tuple(labels), tuple(attention.ranges), selection_columns)


def _of_stage(targets: LayerTargets, stage: int) -> list[DenseTarget]:
    return [target for target in targets.dense if target.stage == stage]


def _attend(run: CalibrationRun, layer: DecoderLayer, attention: AttentionPass, rows: LayerRows) -> int:
    """Write this rank's rows behind attention; the columns of the selection, 0 without one."""
    selection: RowFile | None = None
    for attended in attention.outputs(layer):
        rows.attended.write(attended.batch.first_row, attended.rows)
        if attended.selection is not None and rows.selection_out is not None:
            selection = selection or rows.selection_out(attended.selection.shape[1])
            selection.write(attended.batch.first_row, attended.selection)
    rows.attended.sync()
    if selection is None:
        return 0
    selection.sync()
    selection.close()
    return selection.num_columns


def _propagate(run: CalibrationRun, layer: DecoderLayer, attended: RowFile, out: RowFile) -> None:
    """Write x + mlp(norm(x)) of this rank's rows."""

    def one(batch: WindowBatch) -> Tensor:
        x = attended.read(batch.first_row, batch.num_rows).to(run.load.device)
        return (x + layer.mlp(rms_norm(x, layer.post_norm, layer.eps))).cpu()

    with torch.no_grad():
        results = ordered_map(run.pool, one, run.own_batches, run.ahead)
        for batch, rows in zip(run.own_batches, results, strict=True):
            out.write(batch.first_row, rows)
    out.sync()


def _dense_mlp(layer: DecoderLayer) -> GatedMlp:
    """The dense MLP, or the shared experts of a layer that has routed ones."""
    if isinstance(layer.mlp, GatedMlp):
        return layer.mlp
    if layer.mlp.shared is None:
        raise TypeError("the layer has no shared experts")
    return layer.mlp.shared


def _normed(run: CalibrationRun, layer: DecoderLayer, attended: RowFile, batch: WindowBatch) -> Tensor:
    rows = attended.read(batch.first_row, batch.num_rows).to(run.load.device)
    return rms_norm(rows, layer.post_norm, layer.eps)
