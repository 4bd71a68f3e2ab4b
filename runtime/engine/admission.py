"""What an engine can take at all: its limits, and the refusal of a request that could never run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memopt.errors import CapacityError, UsageError
from memopt.kernels.layout import PAGE_TOKENS
from memopt.runtime.engine.sampling_params import SamplingParams

# A prompt of one token, and one of an answer.
MIN_TOKENS = 2


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Bounds of one engine.

    `max_requests` run at once. `max_step_tokens`: rows of one step. `max_tokens`: the longest sequence, prompt and
    answer together. `num_drafts`: rows that a decoding request may have beyond its one. Raises UsageError for limits
    under which a step could have no row for a prompt.
    """

    max_requests: int
    max_step_tokens: int
    max_tokens: int
    num_drafts: int = 0

    def __post_init__(self) -> None:
        for name, least in (("max_requests", 1), ("max_step_tokens", 1), ("max_tokens", MIN_TOKENS)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} is {getattr(self, name)}, but at least {least} is needed")
        num_decode_rows = self.max_requests * (1 + self.num_drafts)
        if self.max_step_tokens <= num_decode_rows:
            raise UsageError(
                f"max_step_tokens is {self.max_step_tokens}, but {self.max_requests} decoding requests take"
                f" {num_decode_rows} rows of a step and prompts need at least one more",
                remedy=f"use max_step_tokens of {num_decode_rows + 1} or more, or fewer requests",
            )

    @property
    def max_pages(self) -> int:
        """Pages of the longest sequence."""
        return pages_for(self.max_tokens)


def pages_for(num_tokens: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // PAGE_TOKENS)


def require_room(
    prompt: Sequence[int], params: SamplingParams, limits: EngineLimits, vocab_size: int, num_usable_pages: int
) -> None:
    """Refuse a request that this engine could never finish.

    UsageError for an empty prompt or a token outside the vocabulary; CapacityError when prompt and answer together are
    longer than `limits.max_tokens`, or need more pages than the `num_usable_pages` of the cache.
    """
    if not prompt:
        raise UsageError("the prompt is empty", remedy="give at least one token")
    for position, token in enumerate(prompt):
        if not 0 <= token < vocab_size:
            raise UsageError(f"token {position} of the prompt is {token}, but the vocabulary is 0 to {vocab_size - 1}")
    num_tokens = len(prompt) + params.max_tokens
    if num_tokens > limits.max_tokens:
        raise CapacityError(
            f"a prompt of {len(prompt):,} tokens and an answer of up to {params.max_tokens:,} make {num_tokens:,},"
            f" but this engine's longest sequence is {limits.max_tokens:,} tokens",
            remedy=f"shorten the prompt or use max_tokens of {max(limits.max_tokens - len(prompt), 0):,} or less",
        )
    # The last token that is generated is never stored.
    num_pages = pages_for(num_tokens - 1)
    if num_pages > num_usable_pages:
        raise CapacityError(
            f"{num_tokens:,} tokens need {num_pages:,} pages of {PAGE_TOKENS}, but the cache has {num_usable_pages:,}",
            remedy="shorten the request, or give the engine more num_pages or kv_cache_gib",
        )
