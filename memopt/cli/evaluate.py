"""`memopt evaluate`: what a release costs against its base."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memopt.cli.options import json_option
from memopt.cli.output import duration_text, one_line, print_verdict, refusals
from memopt.errors import UsageError

if TYPE_CHECKING:
    from memopt.compressor.evaluate.bootstrap import Interval
    from memopt.compressor.evaluate.gate import GateCheck
    from memopt.compressor.evaluate.quality import Quality
    from memopt.compressor.evaluate.task_scores import TaskScore

KV_CACHES = ("bf16", "fp8_e4m3", "fp8_ds_mla", "fp32")
# A line a layer would be 78 lines and more.
REPORT_SECONDS = 10.0


@click.command("evaluate")
@click.argument("base", metavar="BASE")
@click.argument("release", metavar="RELEASE")
@click.option("--data", metavar="FILE", required=True, help="text.jsonl or ids.safetensors that calibration never saw.")
@click.option("--window", "window_tokens", type=click.IntRange(2), default=2048, help="Longest context (2048).")
@click.option("--max-windows", type=click.IntRange(1), default=None, help="Stretches of text, evenly spaced (all).")
@click.option("--seed", type=click.IntRange(0), default=0, help="Of the bootstrap intervals.")
@click.option("--kv-cache", type=click.Choice(KV_CACHES), default=None, help="The release's KV cache (not rounded).")
@click.option("--base-kv-cache", type=click.Choice(KV_CACHES), default=None, help="The base's KV cache (not rounded).")
@click.option(
    "--compute",
    type=click.Choice(["bfloat16", "float32"]),
    default=None,
    help="Activations: float32 (CPU only, its default) compares weights alone; bfloat16 is what is served.",
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Where layers run.")
@click.option("--scratch", metavar="FOLDER", default=None, help="Keep hidden states in a file there, not in memory.")
@click.option("--base-results", metavar="FILE", default=None, help="lm-eval's results_*.json of the base.")
@click.option("--release-results", metavar="FILE", default=None, help="The same of the release.")
@click.option("--task", "tasks", metavar="NAME", multiple=True, help="Run this task of lm-eval on both (repeatable).")
@click.option("--base-url", metavar="URL", default=None, help="Completions of a server of the base, for --task.")
@click.option("--release-url", metavar="URL", default=None, help="The same of the release.")
@click.option("--base-model", metavar="NAME", default="base", help="The base's name on its server.")
@click.option("--release-model", metavar="NAME", default="release", help="The release's.")
@click.option("--task-limit", type=click.IntRange(1), default=None, help="Samples of each task (all).")
@click.option("--no-write", is_flag=True, help="Only print; do not write quality.json and report.html into RELEASE.")
@json_option
def evaluate_command(
    base: str,
    release: str,
    data: str,
    window_tokens: int,
    max_windows: int | None,
    seed: int,
    kv_cache: str | None,
    base_kv_cache: str | None,
    compute: str | None,
    device: str,
    scratch: str | None,
    no_write: bool,
    as_json: bool,
    **task_options: Any,
) -> None:
    """Compare RELEASE with BASE, the checkpoint it was made from, on text: KL, top-1 agreement, perplexity.

    Both are streamed a layer at a time. quality.json and report.html go into RELEASE, to be signed with it. Exit code
    5 if its recipe's gate does not hold: such a release is not signed.
    """
    with refusals("evaluate", as_json=as_json):
        from memopt.compressor.evaluate.evaluate_release import EvaluateOptions, check_evaluation, evaluate_release
        from memopt.compressor.evaluate.release_gate import read_evaluated_release, refuse_signed, require_writable

        # What can be refused is refused now, not after hours of work.
        base_folder, release_folder = _folder("BASE", base), _folder("RELEASE", release)
        score_tasks = _task_scores(base_folder, seed, **task_options)
        evaluated = read_evaluated_release(release_folder)
        if not no_write:
            refuse_signed(evaluated.folder)
            require_writable(evaluated.folder)
        where = _device(device)
        options = EvaluateOptions(
            window_tokens=window_tokens,
            max_windows=max_windows,
            seed=seed,
            compute=compute or ("float32" if where == "cpu" else "bfloat16"),  # type: ignore[arg-type]  # click.Choice
            kv_cache=kv_cache,
            base_kv_cache=base_kv_cache,
            device=where,
            scratch=_scratch(scratch),
        )
        if task_options["tasks"]:
            # Benchmarks on servers take hours, and come first.
            check_evaluation(base_folder, evaluated.folder, Path(data), options)
        quality = evaluate_release(
            base_folder,
            evaluated.folder,
            Path(data),
            options,
            tasks=score_tasks(),
            on_progress=_progress(quiet=as_json),
        )
        checks = evaluated.checks(quality)
        if not no_write:
            evaluated.write(quality)
        if not as_json:
            _print(quality, checks)
        evaluated.require(quality)
        if not as_json and not no_write:
            click.echo(f"written     quality.json and report.html in {release}")
            click.echo(f"next        memopt sign {release} --key release.pem")
        if as_json:
            print_verdict("evaluate", _fields(quality, checks))


def _folder(argument: str, text: str) -> Path:
    """The folder that an argument names; UsageError for no name, and for a repository on the Hub."""
    from memopt.compressor.checkpoint.hub_types import parse_hub_reference

    if not text:
        raise UsageError(f"{argument} has no name", remedy="name a folder")
    if parse_hub_reference(text) is not None:
        raise UsageError(f"{argument} {text} is on the Hub, folders are read", remedy="fetch it, and name its folder")
    return Path(text)


def _scratch(folder: str | None) -> Path | None:
    """The folder for hidden states; UsageError if it is none."""
    if folder is not None and not Path(folder).is_dir():
        raise UsageError(f"--scratch {folder}: there is no such folder", remedy="make it, or name another one")
    return None if folder is None else Path(folder)


def _task_scores(
    base: Path,
    seed: int,
    *,
    base_results: str | None,
    release_results: str | None,
    tasks: tuple[str, ...],
    base_url: str | None,
    release_url: str | None,
    base_model: str,
    release_model: str,
    task_limit: int | None,
) -> Callable[[], tuple[TaskScore, ...]]:
    """What gives the scores: of two results files, or by running `tasks` on two servers; none if neither is asked for.

    `base`: the folder whose tokenizer and longest sequence lm-eval is given. UsageError and UnsupportedError for a call
    that cannot work, ConfigError for the base's config.json, DataFileError for the files, before anything runs.
    """
    from memopt.compressor.checkpoint.model_config import read_config
    from memopt.compressor.evaluate.lm_eval_run import Endpoint, check_tasks, run_tasks
    from memopt.compressor.evaluate.task_scores import compare_tasks, read_results
    from memopt.runtime.model.config_file import parse_model_config

    if (base_results is None) != (release_results is None):
        raise UsageError("results of one model alone", remedy="give --base-results and --release-results")
    if tasks and (base_url is None or release_url is None):
        raise UsageError("--task without two servers", remedy="give --base-url and --release-url")
    if not tasks and (base_url, release_url, task_limit) != (None, None, None):
        raise UsageError("servers, or a limit, and no task to run", remedy="give --task")
    if base_results is not None and release_results is not None:
        if tasks:
            raise UsageError("--task and results files at once", remedy="give one of them")
        scores = compare_tasks(read_results(Path(base_results)), read_results(Path(release_results)))
        return lambda: scores
    if base_url is None or release_url is None:
        return lambda: ()
    max_tokens = parse_model_config(read_config(base).raw).max_tokens
    models = ((base_url, base_model), (release_url, release_model))
    endpoints = [Endpoint(url, model, base, max_tokens) for url, model in models]
    for endpoint in endpoints:
        check_tasks(endpoint, tasks)

    def run() -> tuple[TaskScore, ...]:
        of_base, of_release = (run_tasks(endpoint, tasks, limit=task_limit, seed=seed) for endpoint in endpoints)
        return compare_tasks(of_base, of_release)

    return run


def _device(choice: str) -> str:
    """ "cpu" or "cuda"; UsageError if CUDA is asked for and absent."""
    import torch

    if choice == "cuda" and not torch.cuda.is_available():
        raise UsageError("there is no CUDA device", remedy="use --device cpu")
    return "cuda" if choice != "cpu" and torch.cuda.is_available() else "cpu"


def _progress(*, quiet: bool) -> Callable[[str, int, int], None]:
    """Lines on standard error, seconds apart."""
    started, last = time.monotonic(), 0.0

    def say(part: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if not quiet and (now - last >= REPORT_SECONDS or done == total):
            last = now
            what = "windows" if part == "compare" else "layers"
            click.echo(f"{part}: {done:,} of {total:,} {what}, {duration_text(now - started)}", err=True)

    return say


def _print(quality: Quality, checks: tuple[GateCheck, ...]) -> None:
    """The figures for people."""
    rows = (
        ("KL, nats a token", quality.kl, ".5f"),
        ("top-1 agreement", quality.top1, ".4f"),
        ("perplexity, base", quality.base_perplexity, ".3f"),
        ("perplexity, release", quality.release_perplexity, ".3f"),
        ("perplexity ratio", quality.perplexity_ratio, ".4f"),
    )
    click.echo(f"{quality.num_tokens:,} tokens of {quality.num_documents:,} documents")
    for name, interval, form in rows:
        click.echo(f"{name:<22}{_interval_text(interval, form)}")
    for score in quality.tasks:
        click.echo(f"{one_line(score.task):<22}{score.base:.2f} to {score.release:.2f} points ({score.drop:+.2f} lost)")
    for check in checks:
        click.echo(f"gate {'holds' if check.holds else 'FAILS'}: {one_line(check.describe())}")
    if quality.base.kind != "source":
        click.echo("note: BASE is not the checkpoint that RELEASE was made from", err=True)
    sys.stdout.flush()


def _interval_text(interval: Interval, form: str) -> str:
    return f"{interval.value:{form}} ({interval.low:{form}} to {interval.high:{form}})"


def _fields(quality: Quality, checks: tuple[GateCheck, ...]) -> dict[str, Any]:
    """The verdict's own fields."""
    names = ("kl", "top1", "base_perplexity", "release_perplexity", "perplexity_ratio")
    return {
        "num_tokens": quality.num_tokens,
        "num_documents": quality.num_documents,
        **{name: asdict(getattr(quality, name)) for name in names},
        "base": asdict(quality.base),
        "release": asdict(quality.release),
        "data_sha256": quality.data.sha256,
        "tasks": [asdict(score) for score in quality.tasks],
        "gate": [{"check": check.describe(), "holds": check.holds} for check in checks],
    }
