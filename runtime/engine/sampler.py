"""Chooses tokens from logits: the likeliest, or one drawn from the softmax, perhaps of its top-p part.

A draw needs one number in [0, 1), which depends on the request's seed and the token's position alone. Ties go to the
lower token id. Everything is row by row: a row's token does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memopt.runtime.engine.sampling_params import SamplingParams

_WORD_BITS = 64
_MASK = (1 << _WORD_BITS) - 1
# SplitMix64 (Steele, Lea, Flood 2014; Vigna, prng.di.unimi.it/splitmix64.c): increment, and two multipliers of the mix.
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# Bits of a float64 below 1.
_FRACTION_BITS = 53


@dataclass(frozen=True, slots=True)
class Pick:
    """How a row's token is chosen; `position` is where the token will stand in its sequence."""

    params: SamplingParams
    position: int


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), multiple of 2**-53: the position-th of the SplitMix64 stream of the mixed seed."""
    return (_mix(_mix(seed) + (position + 1) * _GOLDEN_GAMMA) >> (_WORD_BITS - _FRACTION_BITS)) / 2**_FRACTION_BITS


def choose_tokens(logits: Tensor, picks: Sequence[Pick]) -> Tensor:
    """int64 [S]: a token for each row of `logits` float32 [S, vocab].

    Temperature 0 takes the largest logit. Else token t is drawn with probability softmax(logits / temperature)[t];
    with top_p < 1 only from the likeliest tokens whose sum first reaches top_p, the one that reaches it included.
    Rows with a NaN give some token; `finite_rows` finds them.
    """
    tokens = logits.argmax(dim=-1)
    plain = [row for row, pick in enumerate(picks) if pick.params.temperature > 0 and pick.params.top_p == 1]
    nucleus = [row for row, pick in enumerate(picks) if pick.params.temperature > 0 and pick.params.top_p < 1]
    # Two groups, since the order in which probabilities are added up must not depend on the other rows.
    for rows in (plain, nucleus):
        if rows:
            index = torch.tensor(rows, device=logits.device)
            tokens[index] = _drawn(logits[index], [picks[row] for row in rows], is_sorted=rows is nucleus)
    return tokens


def finite_rows(logits: Tensor) -> Tensor:
    """bool [S]: rows of `logits` [S, vocab] that have no NaN and no +infinity."""
    return logits.amax(dim=-1).isfinite()


def _drawn(logits: Tensor, picks: Sequence[Pick], *, is_sorted: bool) -> Tensor:
    numbers = [(pick.params.temperature, pick.params.top_p, uniform(pick.params.seed, pick.position)) for pick in picks]
    temperature, top_p, draw = torch.tensor(numbers, dtype=torch.float64, device=logits.device)[:, :, None].unbind(1)
    # The maximum goes first: a tiny temperature then drives the others to -infinity, never anything to +infinity.
    scaled = ((logits - logits.amax(dim=-1, keepdim=True)) / temperature).to(torch.float32)
    probabilities = scaled.softmax(dim=-1)
    order = None
    if is_sorted:
        probabilities, order = probabilities.sort(dim=-1, descending=True, stable=True)
    reached = probabilities.cumsum(dim=-1, dtype=torch.float64)
    last = torch.full_like(draw, logits.shape[-1] - 1, dtype=torch.int64)
    if is_sorted:
        # Tokens before whose own share the sum has not yet reached top_p; the first always is one.
        last = (reached[:, :-1] < top_p).sum(dim=-1, keepdim=True)
    total = reached.gather(1, last)
    index = (reached <= draw * total).sum(dim=-1, keepdim=True).minimum(last)
    return (index if order is None else order.gather(1, index)).squeeze(1)


def _mix(value: int) -> int:
    """SplitMix64's output function of the low 64 bits."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)
