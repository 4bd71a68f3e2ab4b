"""KL, surprise and agreement against float64 sums written out; bootstrap against what is known of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from evaluate_scores import made_scores
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.compressor.evaluate.bootstrap import mean_interval, resampling, sums_by_unit
from memopt.compressor.evaluate.token_scores import joined, placed, score_logits
from memopt.errors import NonFiniteError, ShapeError


@given(st.integers(1, 150), st.integers(2, 60), st.floats(0.1, 20), st.integers(0, 2**31 - 1))
@settings(max_examples=30, deadline=None)
def test_scores_are_those_of_float64(rows: int, vocabulary: int, spread: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    base, release = (torch.randn(rows, vocabulary, generator=generator) * spread for _ in range(2))
    came = torch.randint(0, vocabulary, (rows,), generator=generator)
    found = score_logits(base, release, came)
    log_p, log_q = (logits.double().log_softmax(-1) for logits in (base, release))
    kl = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    np.testing.assert_allclose(found.kl, kl.numpy(), atol=2e-5 * spread)
    np.testing.assert_allclose(found.base_surprise, -log_p[range(rows), came].numpy(), atol=1e-5 * spread)
    np.testing.assert_allclose(found.release_surprise, -log_q[range(rows), came].numpy(), atol=1e-5 * spread)
    assert found.is_top1_same.tolist() == (base.argmax(-1) == release.argmax(-1)).tolist()


def test_equal_models_have_no_kl_and_worse_ones_a_known_one() -> None:
    base = torch.tensor([[0.0, 0.0], [3.0, -1.0]])
    same = score_logits(base, base + 5, torch.tensor([0, 1]))
    np.testing.assert_allclose(same.kl, 0, atol=1e-12)
    assert same.is_top1_same.all()
    # KL of (1/2, 1/2) to (3/4, 1/4), by hand.
    other = score_logits(torch.zeros(1, 2), torch.tensor([[3.0, 1.0]]).log(), torch.tensor([1]))
    np.testing.assert_allclose(other.kl, [0.5 * np.log(0.5 / 0.75) + 0.5 * np.log(0.5 / 0.25)], rtol=1e-6)
    np.testing.assert_allclose(other.release_surprise, [np.log(4)], rtol=1e-6)


def test_a_window_knows_its_place() -> None:
    logits = torch.zeros(3, 4)
    found = placed(score_logits(logits, logits, torch.tensor([0, 1, 2])), document=5, start=100)
    assert found.document.tolist() == [5, 5, 5]
    assert found.position.tolist() == [101, 102, 103]
    assert found.context.tolist() == [1, 2, 3]
    assert len(joined([found, found])) == 6


def test_what_cannot_be_compared_is_refused() -> None:
    good = torch.zeros(2, 3)
    with pytest.raises(ShapeError, match=r"\[2, 3\] and \[2, 4\]"):
        score_logits(good, torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))
    bad = good.clone()
    bad[1, 1] = torch.inf
    with pytest.raises(NonFiniteError, match="the release's logits"):
        score_logits(good, bad, torch.zeros(2, dtype=torch.int64))


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    """400 data sets of 30 documents whose true mean is 1: the 95 % interval misses it 2 to 10 % of the time."""
    generator = np.random.default_rng(3)
    draws = resampling(30, seed=1, num_resamples=500)
    misses = 0
    for _ in range(400):
        sums, tokens = generator.normal(10, 3, 30), np.full(30, 10.0)
        interval = mean_interval(sums, tokens, draws)
        assert interval.low <= interval.value <= interval.high
        misses += not interval.low <= 1 <= interval.high
    assert 0.02 <= misses / 400 <= 0.10


def test_documents_are_resampled_whole() -> None:
    """Two thousand equal tokens of two documents say no more than two tokens: the interval stays wide."""
    values = np.concatenate([np.zeros(1000), np.ones(1000)])
    unit = np.repeat([0, 1], 1000)
    interval = mean_interval(sums_by_unit(values, unit, 2), np.array([1000.0, 1000.0]), resampling(2, seed=0))
    assert (interval.low, interval.value, interval.high) == (0.0, 0.5, 1.0)


def test_the_same_seed_gives_the_same_interval_and_exp_is_taken_last() -> None:
    scores = made_scores()
    sums, tokens = sums_by_unit(scores.kl, scores.document, 8), np.full(8, 40.0)
    first, again = (mean_interval(sums, tokens, resampling(8, seed=5)) for _ in range(2))
    assert first == again
    other = mean_interval(sums, tokens, resampling(8, seed=6))
    assert other != first
    exponential = mean_interval(sums, tokens, resampling(8, seed=5), is_exponential=True)
    np.testing.assert_allclose(
        [exponential.value, exponential.low, exponential.high], np.exp([first.value, first.low, first.high])
    )
