"""What came of a request so far, and who gives it out."""

from __future__ import annotations

from dataclasses import dataclass, field

from memopt.runtime.engine.events import Completion, FinishReason, TokenEvent


@dataclass(slots=True)
class Answer:
    """Grows with every step. `is_claimed`: `generate` or `stream` gives it out, so `Engine.step` does not tell of it.

    `pieces`: its text, none of them empty. `submitted_seconds`: of time.monotonic().
    """

    num_prompt_tokens: int
    submitted_seconds: float
    is_claimed: bool
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def is_finished(self) -> bool:
        """Whether nothing more comes."""
        return self.finish_reason is not None

    def take(self, event: TokenEvent) -> None:
        """Add what one event tells of the request."""
        if event.token_id is not None:
            self.token_ids.append(event.token_id)
        if event.text:
            self.pieces.append(event.text)
        self.finish_reason = event.finish_reason

    def completion(self, request_id: int) -> Completion:
        """The whole of a finished answer."""
        reason = self.finish_reason or "abort"
        return Completion(request_id, tuple(self.token_ids), "".join(self.pieces), reason, self.num_prompt_tokens)
