"""How a request's tokens are chosen, and when it ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

from memopt.errors import UsageError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """`temperature` 0: the likeliest token. `top_p`: the smallest set of tokens that holds this much probability.

    Equal seeds, prompts and releases give equal tokens, whatever else runs: a token's random number depends on the seed
    and the token's place alone. `stop`: texts that end the answer and are not part of it. `ignore_eos`: go on after
    the model's own end. Raises UsageError for a value out of range.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("max_tokens", "seed"):
            if not isinstance(getattr(self, name), int):
                raise UsageError(f"{name} is {getattr(self, name)!r}", remedy="use a whole number")
        if isinstance(self.stop, str):
            raise UsageError(
                f"stop is the text {self.stop!r}, whose characters would end the answer", remedy="use a list"
            )
        object.__setattr__(self, "stop", tuple(self.stop))
        if self.max_tokens < 1:
            raise UsageError(f"max_tokens is {self.max_tokens}, but at least 1 token is generated")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UsageError(f"temperature is {self.temperature}", remedy="use 0 (the likeliest token) or more")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p is {self.top_p}", remedy="use more than 0 and at most 1")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed is {self.seed}", remedy="use 0 to 2**63 - 1")
        if "" in self.stop:
            raise UsageError("an empty stop text ends every answer before it begins")
