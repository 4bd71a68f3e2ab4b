"""The public functions: inspect, plan, compress, dequantize."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from memopt.compressor.calibration_options import CalibrationOptions
from memopt.compressor.calibration_summary import calibration_by_role
from memopt.compressor.checkpoint.checkpoint import Checkpoint, raise_first
from memopt.compressor.checkpoint.hub import parse_hub_reference
from memopt.compressor.checkpoint.model_config import MAX_CONFIG_SIZE_BYTES, ModelConfig, parse_config
from memopt.compressor.checkpoint.skeleton import skeleton_checkpoint
from memopt.compressor.families.registry import family_of
from memopt.compressor.inspection import Inspection, inspect_scan
from memopt.compressor.output_folder import check_output_place
from memopt.compressor.pipeline import RunResult, run_plan
from memopt.compressor.plan import Plan, PlanOptions, build_plan
from memopt.compressor.preflight import check_before_download
from memopt.compressor.progress import DownloadCallback, ProgressCallback
from memopt.compressor.quantize.backend import Device, choose_backend
from memopt.compressor.recipe import DEFAULT_RECIPES, Recipe, load_recipe
from memopt.compressor.run_ranks import ranks_from_environment
from memopt.compressor.source import OpenedSource, continuable, local_folder, open_source, scanned_source
from memopt.compressor.source_identity import SourceIdentity
from memopt.errors import ConfigError, InterruptedRunError, UsageError
from memopt.manifests.file_roles import LEDGER_NAME
from memopt.manifests.strict_json import read_capped

if TYPE_CHECKING:
    from memopt.manifests.sign import SignOptions
    from memopt.manifests.signer import Signer


DEQUANTIZE_RECIPE = "dequantize"


def inspect(source: str | Path) -> Inspection:
    """What a checkpoint is, from its headers alone.

    `source`: a folder, or a Hub repository as "org/name@revision". Problems of files and tensors are listed in the
    result; raises UsageError if there is no such folder, UnsupportedError for an unknown family.
    """
    with scanned_source(source) as (scan, identity):
        return inspect_scan(scan, identity)


def _recipe(recipe: str | Path | Recipe | None, config: ModelConfig) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    # An unsupported model is that, whatever recipe it has or lacks.
    return load_recipe(DEFAULT_RECIPES[family_of(config).name] if recipe is None else str(recipe))


def plan(
    source: str | Path,
    recipe: str | Path | Recipe | None = None,
    *,
    options: PlanOptions | None = None,
) -> Plan:
    """Every tensor's fate and every output file's exact size, before any work.

    `source`: a folder or Hub repository; headers alone are read. `recipe`: a shipped recipe's name, a YAML file, a
    Recipe, or None for the family's default. Raises as `build_plan`.
    """
    options = options or PlanOptions()
    with scanned_source(source, allow_code=options.allow_code) as (scan, identity):
        raise_first(scan.problems)
        return build_plan(scan.checkpoint, _recipe(recipe, scan.checkpoint.config), options, identity)


def plan_config(
    config: str | Path, recipe: str | Path | Recipe | None = None, *, options: PlanOptions | None = None
) -> Plan:
    """The plan for the checkpoint that a config.json describes, without having it: names and shapes as published."""
    parsed = parse_config(read_capped(Path(config), MAX_CONFIG_SIZE_BYTES, ConfigError), Path(config).name)
    return build_plan(skeleton_checkpoint(parsed), _recipe(recipe, parsed), options)


def compress(
    source: str | Path,
    out: str | Path,
    *,
    recipe: str | Path | Recipe | None = None,
    options: PlanOptions | None = None,
    workers: int | None = None,
    device: Device = "auto",
    progress: ProgressCallback | None = None,
    download: DownloadCallback | None = None,
    signers: Sequence[Signer] = (),
    sign_options: SignOptions | None = None,
    calibration: CalibrationOptions | None = None,
) -> RunResult:
    """Turn an FP8 (or BF16) checkpoint into a release in folder `out`; resumes an interrupted run of the same call.

    `workers`: threads, one unit each (None: one a core). `progress` gets a Progress, sizes in source bytes.
    `signers`: who signs the finished release, as `memopt.sign_release` does; without any it stays unsigned. UsageError
    for signers and a recipe with a gate, which nothing was measured for yet.
    `calibration`: data for a recipe with method weighted or gptq.
    Started by torchrun, its processes share the work: all call this with one `out` that all of them see.
    The bytes written depend on source, recipe, options and calibration data alone. Raises subclasses of MemoptError.
    """
    if not str(source) or not str(out):
        # Path("") is the working directory: an unset shell variable must not fill it.
        raise UsageError(f"the {'source' if not str(source) else 'output'} has no name", remedy="name a folder")
    if workers is not None and workers < 1:
        raise UsageError(f"{workers} workers do nothing", remedy="use 1 or more")
    workers = default_workers() if workers is None else workers
    if calibration is not None and not isinstance(calibration, CalibrationOptions):
        raise UsageError(f"calibration is a {type(calibration).__name__}", remedy="give CalibrationOptions(data)")
    ranks = ranks_from_environment()
    backend = choose_backend(device, ranks.local_rank if ranks.num_ranks > 1 else None)
    if recipe is not None and not isinstance(recipe, Recipe):
        recipe = load_recipe(str(recipe))
    options = options or PlanOptions()
    if calibration is not None:
        options = replace(options, calibration=calibration.identity())
    if not ranks.is_first:
        # Rank 0 alone says how far it is.
        progress = download = None
    opened, built = _open_and_plan(source, Path(out), recipe, options, download, is_signed=bool(signers))
    if calibration is not None and built.recipe.needs_calibration:
        from memopt.compressor.calibrate.calibrate_model import require_calibratable

        # While the output folder is still as it was.
        require_calibratable(built, calibration, num_workers=workers, num_ranks=ranks.num_ranks)
    result = run_plan(
        built,
        Path(out),
        backend=backend,
        workers=workers,
        progress=progress,
        before_finish=opened.require_unchanged,
        calibration=calibration,
        ranks=ranks,
    )
    if calibration is not None and ranks.is_first:
        with (Path(out) / LEDGER_NAME).open("rb") as ledger:
            result = replace(result, calibration_by_role=calibration_by_role(ledger))
    if not signers or not ranks.is_first:
        return result
    from memopt.manifests.sign import sign_release

    try:
        signed = sign_release(out, signers, sign_options)
        return replace(result, root_digest=signed.root_digest, sign_notes=signed.notes)
    except KeyboardInterrupt:
        raise InterruptedRunError(
            f"stopped while {out} was signed: the release is finished, its signature is not",
            remedy="run the same command again, or `memopt sign`: nothing is compressed anew",
        ) from None


def _open_and_plan(
    source: str | Path,
    out: Path,
    recipe: Recipe | None,
    options: PlanOptions,
    download: DownloadCallback | None,
    *,
    is_signed: bool,
) -> tuple[OpenedSource, Plan]:
    """Of a Hub repository the plan comes first, from headers: what can be refused is refused before the download."""

    def make_plan(checkpoint: Checkpoint, identity: SourceIdentity) -> Plan:
        chosen = _recipe(recipe, checkpoint.config)
        if is_signed and chosen.gate is not None:
            raise UsageError(
                f"recipe {chosen.name} sets a quality gate: nothing can be signed before it is measured",
                remedy="compress without a key, then memopt evaluate SRC OUT --data text.jsonl, then memopt sign OUT",
            )
        return build_plan(checkpoint, chosen, options, identity)

    reference = parse_hub_reference(str(source))
    if reference is None:
        check_output_place(local_folder(source), out)
        opened = open_source(source)
        return opened, make_plan(opened.checkpoint, opened.identity)
    early = check_before_download(reference, out, make_plan, allow_code=options.allow_code)
    with continuable(reference):
        opened = open_source(
            source,
            download=download,
            allow_code=options.allow_code,
            listing=early.listing if early else None,
            keep_free_bytes=early.keep_free_bytes if early else 0,
        )
        plan = make_plan(opened.checkpoint, opened.identity)
        if early is not None:
            early.require_same(plan)
        return opened, plan


def dequantize(
    release: str | Path,
    out: str | Path,
    *,
    options: PlanOptions | None = None,
    workers: int | None = None,
    progress: ProgressCallback | None = None,
    download: DownloadCallback | None = None,
) -> RunResult:
    """The way back: every INT4 and FP8 weight of a release or checkpoint becomes BF16, in folder `out`."""
    return compress(
        release,
        out,
        recipe=DEQUANTIZE_RECIPE,
        options=options,
        workers=workers,
        device="cpu",
        progress=progress,
        download=download,
    )


def default_workers() -> int:
    """One worker for each core that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
