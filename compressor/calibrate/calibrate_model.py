"""Calibrates a model layer by layer: one layer's weights, one wave of Hessians and a few batches in memory at a time.

The samples' rows between layers lie in the store's files; a finished layer is never done again.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from memopt.compressor.calibrate.calibration_run import CalibrationRun, run_sizes
from memopt.compressor.calibrate.expert_memory import require_calibration_memory
from memopt.compressor.calibrate.layer_sequence import OnLayer, layer_sequence, run_layers
from memopt.compressor.calibrate.layer_targets import layer_targets
from memopt.compressor.calibration_options import CalibrationOptions
from memopt.compressor.calibration_store import CalibrationStore
from memopt.compressor.evaluate.calibration_data import TEXT_SUFFIX, read_token_data
from memopt.compressor.evaluate.evaluate_release import text_encoder
from memopt.compressor.evaluate.stored_model import StoredModel
from memopt.compressor.evaluate.token_windows import Window, packed_windows
from memopt.compressor.evaluate.window_rows import batches
from memopt.compressor.kv_scale_plan import brings_kv_scales
from memopt.compressor.plan import Plan
from memopt.errors import SourceChangedError, UsageError
from memopt.kernels.calibration.float32_matmul import ieee_float32_matmul
from memopt.kernels.calibration.one_thread import one_cpu_thread
from memopt.runtime.model.config_file import parse_model_config
from memopt.runtime.parallel.communicator import Communicator, SingleRank
from memopt.runtime.weights.load_options import LoadOptions


def calibrate_model(
    plan: Plan,
    store: CalibrationStore,
    options: CalibrationOptions,
    *,
    num_workers: int = 1,
    communicator: Communicator | None = None,
    local_rank: int = 0,
    on_layer: OnLayer = lambda done, total: None,
) -> None:
    """Put codes, scales and figures of all calibrated weights of `plan` into `store`; goes on where it stopped.

    On the CPU the bytes depend on plan, data and `options.identity()` alone: neither on batches nor on threads nor on
    ranks. All ranks call it together, with one store, each on its machine's GPU `local_rank`. Raises what reading,
    building and rounding raise; DataFileError for data that does not do, PeerError when another rank ends.
    """
    folder = plan.source.folder
    if folder is None:
        raise UsageError("a plan from a config alone has no weights", remedy="name a checkpoint folder")
    device = options.chosen_device
    with ExitStack() as stack:
        model = stack.enter_context(StoredModel(folder))
        place = device if device == "cpu" or communicator is None else f"{device}:{local_rank}"
        load = LoadOptions("float32" if device == "cpu" else "bfloat16", "released", place)
        windows = _windows(model, plan, folder, options)
        # Settings of the process, entered before any thread starts. Threads share the work by batches and experts: the
        # bits of a product may depend on how many threads torch gives it.
        stack.enter_context(ieee_float32_matmul())
        stack.enter_context(one_cpu_thread() if device == "cpu" else nullcontext())
        ranks = communicator or SingleRank()
        if ranks.rank == 0:
            # Others write only after they have agreed with this rank.
            store.remove_leftovers()
        num_threads = num_workers if device == "cpu" else 1
        most_threads, memory_bytes = _agreed(ranks, num_threads, options.memory_bytes)
        run = CalibrationRun(
            model,
            replace(options, memory_bytes=memory_bytes),
            load,
            store,
            batches(windows, _batch_tokens(options, most_threads * ranks.num_ranks)),
            ranks,
            stack.enter_context(ThreadPoolExecutor(num_threads, thread_name_prefix="memopt-calibrate")),
            num_threads,
            most_threads,
            plan.recipe.kv_cache if brings_kv_scales(plan.recipe) else None,
        )
        targets = layer_targets(plan.tensors, model.config.name_prefix)
        require_calibration_memory(run.sizes, targets.values())
        run_layers(run, targets, on_layer)
    store.open()


def require_calibratable(plan: Plan, options: CalibrationOptions, *, num_workers: int = 1, num_ranks: int = 1) -> None:
    """Raise what `calibrate_model` would raise for the data, the recipe or the budget, before anything is written.

    On a CPU the budget of several ranks is not looked at: how many threads the others have is not known yet.
    """
    folder = plan.source.folder
    if folder is None:
        return
    config = parse_model_config(plan.source.config.raw)
    targets = layer_targets(plan.tensors, config.name_prefix)
    layer_sequence(config, targets, measures_kv=brings_kv_scales(plan.recipe))
    with StoredModel(folder) as model:
        windows = _windows(model, plan, folder, options)
    is_cpu = options.chosen_device == "cpu"
    if is_cpu and num_ranks > 1:
        return
    num_threads = num_workers if is_cpu else 1
    together = batches(windows, _batch_tokens(options, num_threads * num_ranks))
    require_calibration_memory(run_sizes(config, options, together, num_threads), targets.values())


def _agreed(ranks: Communicator, num_threads: int, memory_bytes: int) -> tuple[int, int]:
    """The most threads and the least memory that a rank has: batches and waves follow from them, the same on all."""
    most = ranks.maximum(torch.tensor([num_threads, -memory_bytes]))
    return int(most[0]), -int(most[1])


def _windows(model: StoredModel, plan: Plan, folder: Path, options: CalibrationOptions) -> list[Window]:
    """The samples. SourceChangedError if the file is no longer the one whose digest the release will have."""
    if options.sample_tokens > model.config.max_tokens:
        raise UsageError(
            f"samples of {options.sample_tokens:,} tokens, the model is made for {model.config.max_tokens:,}",
            remedy=f"use --seq-len {model.config.max_tokens} or less",
        )
    encode = text_encoder(folder) if options.data.suffix == TEXT_SUFFIX else None
    data = read_token_data(options.data, model.config.vocab_size, encode)
    planned = plan.options.calibration
    if planned is not None and planned.sha256 != data.digest.sha256:
        raise SourceChangedError(
            "was changed after its digest was taken",
            file=options.data.name,
            remedy="let nobody write to it, and run the same command again",
        )
    packed = packed_windows(data, options.num_samples, options.sample_tokens)
    return [Window(number, 0, ids) for number, ids in enumerate(packed)]


def _batch_tokens(options: CalibrationOptions, num_shares: int) -> int:
    """Tokens of a batch: on a CPU, where results do not depend on it, so few that every thread of a rank has some."""
    if options.chosen_device != "cpu":
        return options.batch_tokens
    share = -(-options.num_samples // num_shares) * options.sample_tokens
    return min(options.batch_tokens, share)
