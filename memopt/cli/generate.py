"""`memopt generate`: text from a signed release."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memopt.cli.generate_engine import EngineArguments, engine_options, open_engine
from memopt.cli.generate_output import failure_of, print_json, print_texts, shown, summary
from memopt.cli.generate_prompts import Prompt, PromptArguments, gather_prompts, prompt_options
from memopt.cli.options import json_option
from memopt.cli.output import echo_quietly, print_verdict, refusals
from memopt.cli.release_trust import load_release_trust, release_trust_options
from memopt.errors import MemoptIOError, UsageError

if TYPE_CHECKING:
    from memopt.runtime.engine.engine import Engine
    from memopt.runtime.engine.sampling_params import SamplingParams


@click.command("generate")
@click.argument("release", metavar="RELEASE")
@release_trust_options
@prompt_options
@click.option("--max-tokens", type=int, default=256, show_default=True, help="Longest answer, in tokens.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0: always the likeliest token.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Choose within this much probability.")
@click.option("--seed", type=int, default=0, show_default=True, help="Equal seeds give equal answers.")
@click.option("--stop", metavar="TEXT", multiple=True, help="End the answer before this text; again for further ones.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the model's own end.")
@engine_options
@click.option("--metrics", "metrics_file", metavar="FILE", default=None, help="Write metrics there, for Prometheus.")
@json_option
def generate_command(
    release: str,
    policy: str | None,
    verify_key: str | None,
    prompts: tuple[str, ...],
    prompt_files: tuple[str, ...],
    token_ids: tuple[str, ...],
    chats: tuple[str, ...],
    system: str | None,
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    stop: tuple[str, ...],
    ignore_eos: bool,
    metrics_file: str | None,
    as_json: bool,
    **engine: Any,
) -> None:
    """Generate text from RELEASE, whose every byte is verified first: --policy or --verify-key is needed.

    One prompt's answer is printed as it comes; several run together and are printed at the end. With --json each answer
    is a line, then a verdict with the engine's metrics. With --tp N, N ranks run this command under torchrun, and the
    first of them prints.
    """
    is_first_rank = os.environ.get("RANK", "0") == "0"
    with refusals("generate", as_json=as_json and is_first_rank):
        trust = load_release_trust(policy, verify_key)
        if trust is None:
            raise UsageError(
                "no policy and no key: nobody is trusted",
                remedy="give --policy trust.json, or --verify-key with the publisher's public key",
            )
        asked = gather_prompts(PromptArguments(prompts, prompt_files, token_ids, chats, system))
        from memopt.runtime.engine.sampling_params import SamplingParams

        params = SamplingParams(max_tokens, temperature, top_p, seed, stop, ignore_eos)
        is_streamed = len(asked) == 1 and not as_json
        with open_engine(release, trust, EngineArguments(**engine)) as running:
            if is_streamed:
                ends: list[str | None] = [stream(running, asked[0], params, is_printed=is_first_rank)]
            else:
                completions = running.generate(asked, params)
                ends = [completion.finish_reason for completion in completions]
            metrics = running.metrics()
        if not is_first_rank:
            return
        if as_json:
            print_json(completions)
        elif not is_streamed:
            print_texts(completions)
        if metrics_file is not None:
            from memopt.runtime.engine.prometheus import prometheus_text

            write_whole(Path(metrics_file), prometheus_text(metrics))
        failure = failure_of(ends)
        if failure is not None:
            raise failure
        if as_json:
            print_verdict("generate", {"metrics": metrics.fields()})
        else:
            echo_quietly(summary(ends, metrics.fields()), err=True)


def stream(engine: Engine, prompt: Prompt, params: SamplingParams, *, is_printed: bool) -> str | None:
    """Print one answer while it comes, then end the line; gives its finish reason."""
    request_id = engine.submit(prompt, params)
    end: str | None = None
    while engine.has_work:
        for event in engine.step():
            end = event.finish_reason if event.request_id == request_id else end
            if is_printed:
                click.echo(shown(event.text), nl=False)
    if is_printed:
        click.echo()
    return end


def write_whole(path: Path, text: str) -> None:
    """Put `text` into `path` by a rename, so that a scraper never reads half of it. MemoptIOError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as problem:
        temporary.unlink(missing_ok=True)
        raise MemoptIOError(f"cannot write: {problem.strerror}", file=str(path)) from None
