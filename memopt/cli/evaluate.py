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
from memopt.cli.output import duration_text, print_verdict, refusals
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
        from memopt.compressor.evaluate.evaluate_release import EvaluateOptions, evaluate_release
        from memopt.compressor.evaluate.gate import check_gate, require_gate
        from memopt.compressor.evaluate.release_gate import gate_of, refuse_signed, write_quality

        folder = Path(release)
        if not no_write:
            # Said now, not after hours of work.
            refuse_signed(folder)
        tasks = _task_scores(Path(base), seed, **task_options)
        where = _device(device)
        options = EvaluateOptions(
            window_tokens=window_tokens,
            max_windows=max_windows,
            seed=seed,
            compute=compute or ("float32" if where == "cpu" else "bfloat16"),  # type: ignore[arg-type]  # click.Choice
            kv_cache=kv_cache,
            base_kv_cache=base_kv_cache,
            device=where,
            scratch=None if scratch is None else Path(scratch),
        )
        quality = evaluate_release(
            Path(base), folder, Path(data), options, tasks=tasks, on_progress=_progress(quiet=as_json)
        )
        gate = gate_of(folder)
        checks = () if gate is None else check_gate(gate, quality)
        if not no_write:
            write_quality(folder, quality)
        if not as_json:
            _print(quality, checks)
        if gate is not None:
            require_gate(gate, quality)
        if as_json:
            print_verdict("evaluate", _fields(quality, checks))


def _task_scores(
    tokenizer: Path,
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
) -> tuple[TaskScore, ...]:
    """Scores from two results files, or from running `tasks` on two servers; none if neither is asked for."""
    from memopt.compressor.evaluate.lm_eval_run import Endpoint, run_tasks
    from memopt.compressor.evaluate.task_scores import compare_tasks, read_results

    if (base_results is None) != (release_results is None):
        raise UsageError("results of one model alone", remedy="give --base-results and --release-results")
    if tasks and (base_url is None or release_url is None):
        raise UsageError("--task without two servers", remedy="give --base-url and --release-url")
    if base_results is not None and release_results is not None:
        if tasks:
            raise UsageError("--task and results files at once", remedy="give one of them")
        return compare_tasks(read_results(Path(base_results)), read_results(Path(release_results)))
    if base_url is None or release_url is None or not tasks:
        return ()
    of_base, of_release = (
        run_tasks(Endpoint(url, model, tokenizer), tasks, limit=task_limit, seed=seed)
        for url, model in ((base_url, base_model), (release_url, release_model))
    )
    return compare_tasks(of_base, of_release)


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
    click.echo(f"{quality.num_tokens:,} tokens of {quality.data.num_documents:,} documents")
    for name, interval, form in rows:
        click.echo(f"{name:<22}{_interval_text(interval, form)}")
    for score in quality.tasks:
        click.echo(f"{score.task:<22}{score.base:.2f} to {score.release:.2f} points ({score.drop:+.2f} lost)")
    for check in checks:
        click.echo(f"gate {'holds' if check.holds else 'FAILS'}: {check.describe()}")
    if quality.base.kind == "checkpoint":
        click.echo("note: BASE is not the checkpoint that RELEASE was made from", err=True)
    sys.stdout.flush()


def _interval_text(interval: Interval, form: str) -> str:
    return f"{interval.value:{form}} ({interval.low:{form}} to {interval.high:{form}})"


def _fields(quality: Quality, checks: tuple[GateCheck, ...]) -> dict[str, Any]:
    """The verdict's own fields."""
    names = ("kl", "top1", "base_perplexity", "release_perplexity", "perplexity_ratio")
    return {
        "num_tokens": quality.num_tokens,
        **{name: asdict(getattr(quality, name)) for name in names},
        "base": asdict(quality.base),
        "release": asdict(quality.release),
        "data_sha256": quality.data.sha256,
        "tasks": [asdict(score) for score in quality.tasks],
        "gate": [{"check": check.describe(), "holds": check.holds} for check in checks],
    }
