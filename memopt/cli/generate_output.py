"""What `memopt generate` prints: one answer as it comes, several one after the other, or a JSON line each."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from memopt.cli.output import duration_text
from memopt.errors import CapacityError, ContentError, MemoptError, NonFiniteError

if TYPE_CHECKING:
    from memopt.runtime.engine.events import Completion

COMPLETION_SCHEMA = "memopt.completion/1"
_SPACE = 0x20
_DELETE = 0x7F
_LAST_C1 = 0x9F


def shown(text: str) -> str:
    """`text` for a terminal, which must not act on it: control characters but line ends and tabs as escapes."""
    return "".join(ascii(c)[1:-1] if _is_control(c) else c for c in text) if sys.stdout.isatty() else text


def _is_control(character: str) -> bool:
    code = ord(character)
    return (code < _SPACE and character not in "\n\t") or _DELETE <= code <= _LAST_C1


def print_texts(completions: Sequence[Completion]) -> None:
    """Several answers, each under its number and how it ended."""
    for number, completion in enumerate(completions, start=1):
        click.echo(f"--- {number} of {len(completions)}, {completion.finish_reason}")
        click.echo(shown(completion.text))


def print_json(completions: Sequence[Completion]) -> None:
    """One line of JSON an answer, in the order of the prompts."""
    for index, completion in enumerate(completions):
        fields = {
            "schema": COMPLETION_SCHEMA,
            "index": index,
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "num_prompt_tokens": completion.num_prompt_tokens,
        }
        click.echo(json.dumps(fields))


def summary(ends: Sequence[str | None], metrics: Mapping[str, Any]) -> str:
    """One line on how fast it went. `ends`: finish reasons; `metrics`: fields of EngineMetrics."""
    performance = metrics["performance"]
    first = performance["time_to_first_token"]["median_seconds"]
    return (
        f"{performance['num_generated_tokens']:,} tokens in {duration_text(performance['busy_seconds'])}"
        f" ({performance['generated_tokens_per_second']:,.1f} tokens/s), first after {first:.3f} s,"
        f" ended by {', '.join(sorted(set(map(str, ends))))}"
    )


def failure_of(ends: Sequence[str | None]) -> MemoptError | None:
    """The refusal that the command ends with when a fault cut answers off; None when none did."""
    if "page_mismatch" in ends:
        return ContentError(
            f"{ends.count('page_mismatch')} of {len(ends)} requests were aborted: a KV page was no longer theirs",
            remedy="the log names request, page and step; these answers are incomplete",
        )
    if "nonfinite" in ends:
        return NonFiniteError(
            f"{ends.count('nonfinite')} of {len(ends)} requests were aborted: their logits are NaN or infinite",
            remedy="try --dtype float32 or --kv-cache bf16",
        )
    if "capacity" in ends:
        return CapacityError("pages were quarantined until a request did not fit any more", remedy="run it again")
    return None
