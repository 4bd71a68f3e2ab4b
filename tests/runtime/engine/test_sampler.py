"""Tokens from logits: greedy, temperature, top-p; what each depends on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memopt.errors import UsageError
from memopt.runtime.engine.sampler import Pick, choose_tokens, finite_rows, uniform
from memopt.runtime.engine.sampling_params import SamplingParams

GREEDY = Pick(SamplingParams(), 0)


def picks(count: int, **params: float) -> list[Pick]:
    return [Pick(SamplingParams(**params), position) for position in range(count)]  # type: ignore[arg-type]


def test_splitmix64_is_the_published_one() -> None:
    # First outputs of Vigna's splitmix64.c for seed 0 mixed once, computed with that program's operations.
    values = [uniform(0, position) for position in range(4)]
    state, expected = 0, []
    for _ in range(4):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % 2**64
        expected.append(((mixed ^ (mixed >> 31)) >> 11) / 2**53)
    # The mix of 0 is 0, so seed 0 is the published stream itself: 0xE220A8397B1DCDAF comes first.
    assert values == expected
    assert values[0] == (0xE220A8397B1DCDAF >> 11) / 2**53


def test_numbers_of_seeds_and_positions_are_spread() -> None:
    numbers = torch.tensor(
        [[uniform(seed, position) for position in range(200)] for seed in range(50)], dtype=torch.float64
    )
    assert 0 <= float(numbers.min()) < 0.01
    assert 0.99 < float(numbers.max()) < 1
    counts = torch.histc(numbers, bins=20, min=0, max=1)
    assert float(((counts - 500) ** 2 / 500).sum()) < 45  # chi-square of 19 degrees, beyond the 99.9th percentile
    assert len(set(numbers.flatten().tolist())) == 10_000


def test_greedy_takes_the_largest_and_the_lower_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [-1.0, -1.0, -2.0, -1.0]])
    assert choose_tokens(logits, [GREEDY, GREEDY]).tolist() == [1, 0]


@pytest.mark.parametrize("top_p", [1.0, 0.75])
def test_draws_follow_the_softmax_of_what_is_kept(top_p: float) -> None:
    logits = torch.tensor([1.0, 3.0, 0.5, 2.5, -2.0])
    drawn = choose_tokens(logits.expand(20_000, -1), picks(20_000, temperature=1.5, top_p=top_p, seed=5))
    probabilities = (logits / 1.5).softmax(0)
    if top_p < 1:
        # 0.46, 0.33, 0.12, ...: the third reaches 0.75? 0.46 + 0.33 = 0.79 does already.
        order = probabilities.argsort(descending=True)
        kept = order[: int((probabilities[order].cumsum(0) < top_p).sum()) + 1]
        assert kept.tolist() == [1, 3]
        probabilities = torch.zeros(5).index_put((kept,), probabilities[kept])
        probabilities /= probabilities.sum()
    found = torch.bincount(drawn, minlength=5) / 20_000
    assert torch.allclose(found, probabilities, atol=0.012)


def test_top_p_keeps_the_token_that_reaches_it() -> None:
    logits = torch.tensor([math.log(0.5), math.log(0.25), math.log(0.25)])
    # Exactly reached by the first token; the second is kept only beyond it, and of two equals the lower id.
    for top_p, kept in ((0.5, {0}), (0.51, {0, 1}), (0.76, {0, 1, 2}), (1e-9, {0})):
        drawn = choose_tokens(logits.expand(500, -1), picks(500, temperature=1.0, top_p=top_p))
        assert set(drawn.tolist()) == kept, top_p


def test_a_tiny_temperature_is_greedy_and_not_nan() -> None:
    logits = torch.randn(20, 50) * 1e4
    drawn = choose_tokens(logits, picks(20, temperature=1e-30, top_p=0.9))
    assert torch.equal(drawn, logits.argmax(dim=1))


@given(st.integers(0, 2**63 - 1), st.integers(0, 10_000), st.booleans())
def test_a_rows_token_does_not_depend_on_the_other_rows(seed: int, position: int, has_top_p: bool) -> None:
    generator = torch.Generator().manual_seed(seed % 2**32)
    logits = torch.randn(9, 333, generator=generator)
    mine = Pick(SamplingParams(temperature=0.8, top_p=0.7 if has_top_p else 1.0, seed=seed), position)
    others = [GREEDY, *picks(3, temperature=2.0), *picks(4, temperature=0.5, top_p=0.3)]
    alone = int(choose_tokens(logits[4:5], [mine]))
    assert int(choose_tokens(logits, [*others[:4], mine, *others[4:]])[4]) == alone


def test_rows_with_a_nan_or_infinity_are_found() -> None:
    logits = torch.zeros(4, 5)
    logits[1, 2], logits[2, 3], logits[3, 0] = math.nan, math.inf, -math.inf
    assert finite_rows(logits).tolist() == [True, False, False, True]
    choose_tokens(logits, picks(4, temperature=1.0, top_p=0.5))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 2.5}, "max_tokens is 2.5"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"seed": "7"}, "seed is '7'"),
        ({"stop": "end"}, "stop is the text 'end'"),
        ({"stop": ("a", "")}, "an empty stop text"),
    ],
)
def test_params_out_of_range_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SamplingParams(**values)


def test_stop_texts_may_be_a_list() -> None:
    """Kept as a tuple: parameters are compared and hashed."""
    assert hash(SamplingParams(stop=["a", "b"])) == hash(SamplingParams(stop=("a", "b")))  # type: ignore[arg-type]


def test_no_seeds_numbers_are_anothers_one_place_on() -> None:
    """SplitMix64 adds a constant a number: unmixed, seeds that lie so far apart would share their numbers."""
    step = 2**64 - 0x9E3779B97F4A7C15
    assert uniform(5 + step, 1) != uniform(5, 0)


def test_a_token_without_probability_is_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even by the smallest number there is."""
    monkeypatch.setattr("memopt.runtime.engine.sampler.uniform", lambda seed, position: 0.0)
    logits = torch.tensor([[-math.inf, 0.0, 0.0]])
    assert choose_tokens(logits, picks(1, temperature=1.0)).tolist() == [1]
