"""What an engine tells its caller: one event a token, and at the end the whole answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

# stop: the model's own end or a stop text. length: max_tokens. abort: the caller's wish. page_mismatch: a page of the
# request was no longer its own. nonfinite: its logits were NaN or infinite. capacity: pages were quarantined until it
# could no longer fit.
FinishReason = Literal["stop", "length", "abort", "page_mismatch", "nonfinite", "capacity"]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A token of a request, or its end, or both.

    `token_id` is None when the request ends without a further token. `text`: what this event adds to the answer; empty
    while it could still be part of a character or of a stop text, and always without a tokenizer. `finish_reason` is
    None until the last event of the request.
    """

    request_id: int
    token_id: int | None
    text: str
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request. `token_ids` holds what was generated, the model's end token included; `text` never does."""

    request_id: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    num_prompt_tokens: int


class TextWatcher(Protocol):
    """Turns one request's tokens into text as they come, and looks for its stop texts."""

    def push(self, token_id: int) -> tuple[str, bool]:
        """Text that is certain now, and whether a stop text ended the answer."""
        ...

    def flush(self) -> str:
        """What was held back, when the answer ends for another reason."""
        ...
