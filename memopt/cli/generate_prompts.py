"""What `memopt generate` is asked: plain texts, files of text, token ids, conversations."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from memopt.errors import MemoptIOError, UsageError

Function = TypeVar("Function", bound=Callable[..., Any])
# As Engine.submit takes them: a text, token ids, or messages.
Prompt = str | list[int] | list[dict[str, str]]

STANDARD_INPUT = "-"


@dataclass(frozen=True)
class PromptArguments:
    """The options that `prompt_options` adds."""

    prompts: tuple[str, ...]
    prompt_files: tuple[str, ...]
    token_ids: tuple[str, ...]
    chats: tuple[str, ...]
    system: str | None


def prompt_options(function: Function) -> Function:
    """--prompt, --prompt-file, --token-ids, --chat and --system, as the fields of PromptArguments."""
    decorators = [
        click.option("--prompt", "prompts", metavar="TEXT", multiple=True, help="Go on from this text."),
        click.option(
            "--prompt-file",
            "prompt_files",
            metavar="FILE",
            multiple=True,
            help="Go on from this file's text, to its last byte (-: standard input).",
        ),
        click.option(
            "--token-ids", "token_ids", metavar="1,2,3", multiple=True, help="Go on from these; needs no tokenizer."
        ),
        click.option(
            "--chat",
            "chats",
            metavar="TEXT",
            multiple=True,
            help="Answer this message, by the release's chat template.",
        ),
        click.option("--system", metavar="TEXT", default=None, help="A system message before each --chat."),
    ]
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


def gather_prompts(arguments: PromptArguments) -> list[Prompt]:
    """All prompts: texts, then files, token ids and conversations, each kind in its own order.

    UsageError without any, for ids that are no numbers, a file that is no UTF-8 or too large, and a --system alone.
    """
    if arguments.system is not None and not arguments.chats:
        raise UsageError("--system stands before a conversation, and there is none", remedy="add --chat")
    prompts: list[Prompt] = [*arguments.prompts]
    prompts += [_file_text(name) for name in arguments.prompt_files]
    prompts += [_ids(text) for text in arguments.token_ids]
    before = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    prompts += [[*before, {"role": "user", "content": text}] for text in arguments.chats]
    if not prompts:
        raise UsageError("there is no prompt", remedy="give --prompt, --prompt-file, --token-ids or --chat")
    return prompts


def _file_text(name: str) -> str:
    from memopt.runtime.text.tokenizer import MAX_PROMPT_BYTES

    try:
        if name == STANDARD_INPUT:
            raw = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
        else:
            with Path(name).open("rb") as file:
                raw = file.read(MAX_PROMPT_BYTES + 1)
    except OSError as problem:
        raise MemoptIOError(f"cannot read: {problem.strerror}", file=name) from None
    if len(raw) > MAX_PROMPT_BYTES:
        raise UsageError(f"a prompt of more than {MAX_PROMPT_BYTES:,} bytes", file=name)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise UsageError(f"is not UTF-8 text: {problem.reason} at byte {problem.start:,}", file=name) from None


def _ids(text: str) -> list[int]:
    parts: Sequence[str] = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= 9 for part in parts):
        raise UsageError(f"--token-ids {text[:60]!r} is no list of numbers", remedy="write them as 1,2,3")
    return [int(part) for part in parts]
