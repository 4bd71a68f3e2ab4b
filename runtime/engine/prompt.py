"""What a caller may give as a prompt, and the token ids that it stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, cast

from memopt.errors import UnsupportedError, UsageError
from memopt.runtime.text.tokenizer import TextTokenizer

# A text, token ids, or the messages of a conversation ({"role": ..., "content": ...}).
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]

_REMEDY = "pass a text, token ids, or a list of messages"


def require_prompts(prompts: Sequence[Prompt]) -> None:
    """UsageError for one prompt where several belong: its characters, or its token ids, would be prompts."""
    if isinstance(prompts, str | bytes | Mapping):
        raise UsageError(f"prompts is one {type(prompts).__name__}, not a list", remedy="put the prompt into a list")


def token_ids_of(prompt: Prompt, tokenizer: TextTokenizer | None, no_tokenizer: UnsupportedError | None) -> list[int]:
    """A prompt's token ids. UsageError for what is no prompt, and for text or messages without a tokenizer.

    `no_tokenizer`: why there is none.
    """
    if isinstance(prompt, str):
        return list(require_tokenizer(tokenizer, no_tokenizer).encode(prompt))
    if isinstance(prompt, bytes | bytearray | Mapping) or not hasattr(prompt, "__len__"):
        raise UsageError(f"a prompt of the type {type(prompt).__name__}", remedy=_REMEDY)
    if len(prompt) and isinstance(prompt[0], Mapping):
        messages = cast(Sequence[Mapping[str, Any]], prompt)
        return list(require_tokenizer(tokenizer, no_tokenizer).encode_chat(messages))
    try:
        return [index(cast(int, token)) for token in prompt]
    except TypeError:
        raise UsageError(f"a prompt of {type(prompt[0]).__name__} values", remedy=_REMEDY) from None


def require_tokenizer(tokenizer: TextTokenizer | None, no_tokenizer: UnsupportedError | None) -> TextTokenizer:
    """The tokenizer. UsageError when the release has none that memopt reads."""
    if tokenizer is None:
        raise UsageError(f"this release has no text: {no_tokenizer}", remedy="pass prompts as token ids")
    return tokenizer
