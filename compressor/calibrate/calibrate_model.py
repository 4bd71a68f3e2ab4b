"""Calibrates a model layer by layer: one layer's weights, one wave of Hessians and a few batches in memory at a time.

The samples' rows between layers lie in the store's files; a finished layer is never done again.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path

import torch

from memopt.compressor.calibrate.calibrate_layer import LayerRows, calibrate_layer
from memopt.compressor.calibrate.calibration_run import CalibrationRun
from memopt.compressor.calibrate.layer_targets import LayerTargets, layer_targets
from memopt.compressor.calibration_options import CalibrationOptions
from memopt.compressor.calibration_store import CalibrationStore, remove_quietly
from memopt.compressor.evaluate.calibration_data import TEXT_SUFFIX, read_token_data
from memopt.compressor.evaluate.evaluate_release import text_encoder
from memopt.compressor.evaluate.stored_model import StoredModel
from memopt.compressor.evaluate.token_windows import Window, packed_windows
from memopt.compressor.evaluate.window_rows import batches
from memopt.compressor.plan import Plan
from memopt.errors import ContentError, UsageError
from memopt.kernels.calibration.float32_matmul import ieee_float32_matmul
from memopt.kernels.calibration.one_thread import one_cpu_thread
from memopt.runtime.model.vocabulary import Embedding
from memopt.runtime.parallel.communicator import Communicator, SingleRank
from memopt.runtime.weights.layer_builder import norm_weight
from memopt.runtime.weights.load_options import LoadOptions

# Called with a layer's number when it is finished, and how many there are to do.
OnLayer = Callable[[int, int], None]


def calibrate_model(
    plan: Plan,
    store: CalibrationStore,
    options: CalibrationOptions,
    *,
    num_workers: int = 1,
    communicator: Communicator | None = None,
    on_layer: OnLayer = lambda done, total: None,
) -> None:
    """Put codes, scales and figures of all calibrated weights of `plan` into `store`; goes on where it stopped.

    The bytes depend on plan, data and `options.identity()` alone, on the CPU: neither on batches nor on threads nor on
    ranks. All ranks call it together, with one store. Raises what reading, building and rounding raise; DataFileError
    for data that does not do, PeerError when another rank ends.
    """
    folder = plan.source.folder
    if folder is None:
        raise UsageError("a plan from a config alone has no weights", remedy="name a checkpoint folder")
    device = options.chosen_device
    with ExitStack() as stack:
        model = stack.enter_context(StoredModel(folder))
        load = LoadOptions("float32" if device == "cpu" else "bfloat16", "released", device)
        windows = _windows(model, folder, options)
        # Settings of the process, entered before any thread starts. Threads share the work by batches and experts: the
        # bits of a product may depend on how many threads torch gives it.
        stack.enter_context(ieee_float32_matmul())
        stack.enter_context(one_cpu_thread() if device == "cpu" else nullcontext())
        num_threads = num_workers if device == "cpu" else 1
        run = CalibrationRun(
            model,
            options,
            load,
            store,
            batches(windows, options.batch_tokens),
            communicator or SingleRank(),
            stack.enter_context(ThreadPoolExecutor(num_threads, thread_name_prefix="memopt-calibrate")),
            num_threads,
        )
        targets = layer_targets(plan.tensors, model.config.name_prefix)
        _run_layers(run, targets, on_layer)
    store.open()


def _windows(model: StoredModel, folder: Path, options: CalibrationOptions) -> list[Window]:
    if options.sample_tokens > model.config.max_tokens:
        raise UsageError(
            f"samples of {options.sample_tokens:,} tokens, the model is made for {model.config.max_tokens:,}",
            remedy=f"use --seq-len {model.config.max_tokens} or less",
        )
    encode = text_encoder(folder) if options.data.suffix == TEXT_SUFFIX else None
    data = read_token_data(options.data, model.config.vocab_size, encode)
    packed = packed_windows(data, options.num_samples, options.sample_tokens)
    return [Window(number, 0, ids) for number, ids in enumerate(packed)]


def _run_layers(run: CalibrationRun, targets: dict[int, LayerTargets], on_layer: OnLayer) -> None:
    calibrated = [layer for layer, found in targets.items() if found.is_calibrated]
    num_layers = run.config.num_layers
    if any(layer >= num_layers for layer in calibrated):
        raise UsageError("MTP layers are not calibrated", remedy="give their experts method rtn by a rule of their own")
    last = max(calibrated, default=-1)
    selection_columns, first = 0, 0
    while first <= last and (extra := run.store.record(first)) is not None:
        selection_columns = int(extra["selection_columns"])
        first += 1
    if first == 0:
        _embed(run)
    elif first <= last:
        _require_rows(run, first)
    for number in range(first, last + 1):
        layer = run.model.layer(number, run.load)
        found = targets.get(number) or LayerTargets(number, (), None)
        with ExitStack() as stack:
            rows = LayerRows(
                stack.enter_context(run.rows(_hidden(number))),
                stack.enter_context(run.rows(f"attended-{number:05d}")),
                stack.enter_context(run.rows(_hidden(number + 1))) if number < last else None,
                stack.enter_context(run.rows(_selection(number), selection_columns, torch.int32))
                if selection_columns
                else None,
                lambda columns, number=number: run.rows(_selection(number + 1), columns, torch.int32),  # type: ignore[misc]
            )
            done = calibrate_layer(run, number, layer, found, rows)
        selection_columns = done.selection_columns
        del layer
        run.barrier()
        if run.rank == 0:
            run.store.finish_layer(number, done.labels, {"selection_columns": selection_columns})
            for name in (_hidden(number), f"attended-{number:05d}", _selection(number)):
                remove_quietly(run.store.folder / name)
        run.barrier()
        on_layer(number + 1, last + 1)


def _hidden(number: int) -> str:
    return f"hidden-{number:05d}"


def _selection(number: int) -> str:
    return f"selection-{number:05d}"


def _embed(run: CalibrationRun) -> None:
    """The rows that the first layer starts from."""
    top = run.model.top_level()
    embedding = Embedding(norm_weight(top, "model.embed_tokens.weight", run.load), run.load.communicator)
    with run.rows(_hidden(0)) as hidden:
        for batch in run.own_batches:
            ids = torch.cat([torch.from_numpy(window.ids) for window in batch.windows])
            hidden.write(batch.first_row, embedding(ids.to(run.load.device)))
        hidden.sync()
    run.barrier()


def _require_rows(run: CalibrationRun, number: int) -> None:
    """ContentError unless the rows that layer `number` starts from are there."""
    path = run.store.folder / _hidden(number)
    with run.rows(_hidden(number)) as rows:
        if not path.is_file() or path.stat().st_size != rows.size_bytes:
            raise ContentError(
                "is not what the finished layers left",
                file=path.name,
                remedy=f"remove {run.store.folder.parent.parent} to calibrate anew",
            )
