"""One request: its tokens, its pages, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from memopt.runtime.engine.events import FinishReason, TextWatcher
from memopt.runtime.engine.sampling_params import SamplingParams
from memopt.runtime.kv.held_page import HeldPage


class RequestState(Enum):
    """waiting -> running -> finished; a preempted request waits again. An aborted one is finished."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


# Requests are told apart by identity: two with the same prompt are two.
@dataclass(slots=True, eq=False)
class Request:
    """Mutable; the scheduler and the engine core change it, between steps.

    `tokens`: prompt, then what was generated. `num_computed`: how many of them have their keys in `pages`. `drafts`:
    guesses of the tokens that follow, not yet verified. `holds_pages`: pages outlive the end of the request, until they
    were handed over. `is_doubtful`: a page was lost while nobody compared tags, so its tokens may be wrong.
    """

    request_id: int
    tokens: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    tenant: str = ""
    text: TextWatcher | None = None
    holds_pages: bool = False
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    num_computed: int = 0
    drafts: tuple[int, ...] = ()
    pages: list[HeldPage] = field(default_factory=list)
    table_row: int | None = None
    num_reused_tokens: int = 0
    num_preemptions: int = 0
    is_doubtful: bool = False
    submitted_seconds: float = 0.0
    has_started: bool = False
    last_token_seconds: float | None = None

    @property
    def num_generated(self) -> int:
        """Tokens that were generated."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_missing(self) -> int:
        """Known tokens whose keys are not in the pages; 1 while the request decodes."""
        return len(self.tokens) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest generated token is missing."""
        return self.num_missing == 1 and self.num_generated > 0

    @property
    def num_tokens_left(self) -> int:
        """Tokens that it may still generate."""
        return self.params.max_tokens - self.num_generated

    def token_at(self, position: int) -> int:
        """The token at a position, or the draft that stands for it."""
        num_known = len(self.tokens)
        return self.tokens[position] if position < num_known else self.drafts[position - num_known]
