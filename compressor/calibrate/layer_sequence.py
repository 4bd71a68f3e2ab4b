"""Layer after layer: the embedding, the decoder's layers, then an MTP layer; each finished one is recorded.

The rows that a layer starts from stay until it is finished: a run that was killed goes on with that layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from memopt.compressor.calibrate.calibrate_layer import LayerRows, calibrate_layer
from memopt.compressor.calibrate.calibration_run import CalibrationRun
from memopt.compressor.calibrate.kv_scales import layer_kv_scales
from memopt.compressor.calibrate.layer_targets import LayerTargets
from memopt.compressor.calibrate.mtp_rows import mtp_windows, write_mtp_rows
from memopt.compressor.calibrate.row_digests import gather_row_ranges, require_same_rows, require_whole
from memopt.compressor.calibrate.row_file import RowFile
from memopt.compressor.calibration_store import remove_quietly
from memopt.compressor.evaluate.window_rows import batches
from memopt.compressor.layer_record import LayerRecord, RowRange
from memopt.errors import ContentError, UnsupportedError
from memopt.runtime.model.decoder_layer import DecoderLayer
from memopt.runtime.model.model_config import ModelConfig
from memopt.runtime.weights.layer_builder import build_embedding

# Called with the number of finished layers, and how many there are to do.
OnLayer = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class LayerSequence:
    """Which layers run: the decoder's up to `num_decoder`, then the MTP layer if `has_mtp`."""

    num_decoder: int
    has_mtp: bool

    @property
    def num_layers(self) -> int:
        """Of both kinds."""
        return self.num_decoder + self.has_mtp


def run_layers(run: CalibrationRun, targets: dict[int, LayerTargets], on_layer: OnLayer) -> None:
    """Calibrate all `targets`; layers behind the last of them are not run. Raises as `calibrate_layer`, and as
    `layer_sequence`.
    """
    sequence = layer_sequence(run.config, targets, measures_kv=run.kv_cache is not None)
    last: LayerRecord | None = None
    first = 0
    while first < sequence.num_layers and (record := run.store.record(first)) is not None:
        last = record
        first += 1
    if first == sequence.num_layers:
        return
    if last is None:
        _embed(run)
    else:
        _require_same_rows(run, last)
    columns = 0 if last is None else last.selection_columns
    for number in range(first, sequence.num_decoder):
        _require_whole_rows(run, number)
        is_last = number + 1 == sequence.num_decoder
        layer = run.model.layer(number, run.load)
        columns = _run_layer(run, number, layer, targets, columns, has_next=not is_last or sequence.has_mtp)
        del layer
        on_layer(number + 1, sequence.num_layers)
    if sequence.has_mtp:
        _run_mtp(run, sequence.num_decoder, targets)
        on_layer(sequence.num_layers, sequence.num_layers)


def layer_sequence(config: ModelConfig, targets: Mapping[int, LayerTargets], *, measures_kv: bool) -> LayerSequence:
    """The layers that `targets` need, up to the last one with data; with `measures_kv` all that store keys.

    UnsupportedError for a second MTP layer among them.
    """
    num_layers = config.num_layers
    last = max((layer for layer, found in targets.items() if found.is_calibrated), default=-1)
    if measures_kv:
        last = num_layers + config.num_mtp_layers - 1
    if last > num_layers:
        raise UnsupportedError(
            f"layer {last} is a second MTP layer, which calibration does not run",
            remedy="give its experts method rtn by a rule of their own, and kv_cache scales: unit",
        )
    return LayerSequence(min(last + 1, num_layers), last == num_layers)


def _run_layer(
    run: CalibrationRun,
    number: int,
    layer: DecoderLayer,
    targets: dict[int, LayerTargets],
    columns: int,
    *,
    has_next: bool,
    prefix: str = "",
) -> int:
    """Calibrate one layer and record it; the columns of the selection that it leaves for the next one.

    A ContentError that names no tensor gets the layer's name.
    """
    found = targets.get(number) or LayerTargets(number, (), None)
    names = [prefix + _hidden(number), f"{prefix}attended-{number:05d}", _selection(number)]
    # Of the next layer's rows, the digests of this rank's.
    digests: dict[str, dict[int, bytes]] = {}

    def next_selection(num_columns: int) -> RowFile:
        rows = run.rows(_selection(number + 1), num_columns, torch.int32, is_hashed=True)
        digests[rows.path.name] = rows.digests
        return rows

    with ExitStack() as stack:
        selection = stack.enter_context(run.rows(names[2], columns, torch.int32)) if columns else None
        rows = LayerRows(
            stack.enter_context(run.rows(names[0])),
            stack.enter_context(run.rows(names[1])),
            stack.enter_context(run.rows(_hidden(number + 1), is_hashed=True)) if has_next else None,
            selection,
            next_selection if has_next and not run.config.has_indexer(number + 1) else None,
        )
        try:
            done = calibrate_layer(run, number, layer, found, rows)
        except ContentError as problem:
            # Inputs that overflow, say: they follow from many tensors.
            problem.tensor = problem.tensor or f"{run.config.name_prefix}model.layers.{number}"
            raise
    if rows.out is not None:
        digests[rows.out.path.name] = rows.out.digests
    left = [_hidden(number + 1)] * has_next + [_selection(number + 1)] * (done.selection_columns > 0)
    ranges = {name: gather_row_ranges(run, digests.get(name, {})) for name in left}
    scales = {} if run.kv_cache is None else layer_kv_scales(run, number, done.ranges)
    run.barrier()
    if run.rank == 0:
        run.store.finish_layer(
            number,
            done.labels,
            run.model.read_sha256,
            rows=ranges,
            selection_columns=done.selection_columns,
            kv_scales=scales,
        )
        for name in names:
            remove_quietly(run.store.folder / name)
    run.barrier()
    return done.selection_columns


def _run_mtp(run: CalibrationRun, number: int, targets: dict[int, LayerTargets]) -> None:
    """The MTP layer, whose rows are those of all tokens but the last of each sample."""
    _require_whole_rows(run, number)
    windows = mtp_windows(run)
    most = max(batch.num_rows for batch in run.batches)
    mtp = replace(run, batches=batches(windows, most))
    prefix = "mtp-"
    with run.rows(_hidden(number)) as hidden, mtp.rows(prefix + _hidden(number)) as out:
        layer = write_mtp_rows(run, mtp, number, hidden, out)
    run.barrier()
    _run_layer(mtp, number, layer, targets, 0, has_next=False, prefix=prefix)
    if run.rank == 0:
        remove_quietly(run.store.folder / _hidden(number))


def _hidden(number: int) -> str:
    return f"hidden-{number:05d}"


def _selection(number: int) -> str:
    return f"selection-{number:05d}"


def _embed(run: CalibrationRun) -> None:
    """The rows that the first layer starts from."""
    top = run.model.top_level()
    embedding = build_embedding(run.config, top, "model.embed_tokens.weight", run.load)
    with run.rows(_hidden(0)) as hidden:
        for batch in run.own_batches:
            ids = torch.cat([torch.from_numpy(window.ids) for window in batch.windows])
            hidden.write(batch.first_row, embedding(ids.to(run.load.device)))
        hidden.sync()
    run.barrier()


def _require_same_rows(run: CalibrationRun, last: LayerRecord) -> None:
    """ContentError unless the rows that finished layer `last` left are there, byte for byte."""
    number = last.layer + 1
    with run.rows(_hidden(number)) as hidden:
        require_same_rows(run, hidden, _ranges(last, hidden))
    if last.selection_columns:
        with run.rows(_selection(number), last.selection_columns, torch.int32) as selection:
            require_same_rows(run, selection, _ranges(last, selection))


def _ranges(last: LayerRecord, rows: RowFile) -> tuple[RowRange, ...]:
    return last.rows.get(rows.path.name, ())


def _require_whole_rows(run: CalibrationRun, number: int) -> None:
    """ContentError unless the rows that layer `number` starts from are there."""
    with run.rows(_hidden(number)) as rows:
        require_whole(run, rows)
