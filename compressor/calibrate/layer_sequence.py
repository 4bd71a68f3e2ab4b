"""Layer after layer: the embedding, the decoder's layers, then an MTP layer; each finished one is recorded.

The rows that a layer starts from stay until it is finished: a run that was killed goes on with that layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from memopt.compressor.calibrate.calibrate_layer import LayerRows, calibrate_layer
from memopt.compressor.calibrate.calibration_run import CalibrationRun
from memopt.compressor.calibrate.kv_scales import layer_kv_scales
from memopt.compressor.calibrate.layer_targets import LayerTargets
from memopt.compressor.calibrate.mtp_rows import mtp_windows, write_mtp_rows
from memopt.compressor.calibrate.row_file import RowFile
from memopt.compressor.calibration_store import KV_SCALES_KEY, remove_quietly
from memopt.compressor.evaluate.window_rows import batches
from memopt.errors import ContentError, UnsupportedError
from memopt.runtime.model.decoder_layer import DecoderLayer
from memopt.runtime.model.model_config import ModelConfig
from memopt.runtime.weights.layer_builder import build_embedding

# Called with the number of finished layers, and how many there are to do.
OnLayer = Callable[[int, int], None]
_COLUMNS_KEY = "selection_columns"


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
    columns, first = 0, 0
    while first < sequence.num_decoder and (extra := run.store.record(first)) is not None:
        columns = int(extra[_COLUMNS_KEY])
        first += 1
    if first == 0:
        _embed(run)
    for number in range(first, sequence.num_decoder):
        _require_rows(run, number)
        is_last = number + 1 == sequence.num_decoder
        layer = run.model.layer(number, run.load)
        columns = _run_layer(run, number, layer, targets, columns, has_next=not is_last or sequence.has_mtp)
        del layer
        on_layer(number + 1, sequence.num_layers)
    if sequence.has_mtp and run.store.record(sequence.num_decoder) is None:
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
    names = [f"{prefix}{name}-{number:05d}" for name in ("hidden", "attended", "selection")]

    def next_selection(num_columns: int) -> RowFile:
        return run.rows(f"selection-{number + 1:05d}", num_columns, torch.int32)

    with ExitStack() as stack:
        selection = stack.enter_context(run.rows(names[2], columns, torch.int32)) if columns else None
        rows = LayerRows(
            stack.enter_context(run.rows(names[0])),
            stack.enter_context(run.rows(names[1])),
            stack.enter_context(run.rows(_hidden(number + 1))) if has_next else None,
            selection,
            next_selection if has_next and not run.config.has_indexer(number + 1) else None,
        )
        try:
            done = calibrate_layer(run, number, layer, found, rows)
        except ContentError as problem:
            # Inputs that overflow, say: they follow from many tensors.
            problem.tensor = problem.tensor or f"{run.config.name_prefix}model.layers.{number}"
            raise
    scales = {} if run.kv_cache is None else layer_kv_scales(run, number, done.ranges)
    run.barrier()
    if run.rank == 0:
        extra: dict[str, Any] = {_COLUMNS_KEY: done.selection_columns, KV_SCALES_KEY: scales}
        run.store.finish_layer(number, done.labels, extra, run.model.read_sha256)
        for name in names:
            remove_quietly(run.store.folder / name)
    run.barrier()
    return done.selection_columns


def _run_mtp(run: CalibrationRun, number: int, targets: dict[int, LayerTargets]) -> None:
    """The MTP layer, whose rows are those of all tokens but the last of each sample."""
    _require_rows(run, number)
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


def _require_rows(run: CalibrationRun, number: int) -> None:
    """ContentError unless the rows that layer `number` starts from are there."""
    with run.rows(_hidden(number)) as rows:
        if rows.path.stat().st_size != rows.size_bytes:
            raise ContentError(
                "is not what the finished layers left",
                file=rows.path.name,
                remedy=f"remove {run.store.folder.parent.parent} to calibrate anew",
            )
