"""KL, surprise and agreement against float64 sums written out; bootstrap against what is known of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from evaluate_scores import made_scores
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.compressor.evaluate.bootstrap import (
    Interval,
    Resampling,
    exponential,
    mean_intervals,
    sums_by_unit,
    tail_share,
)
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
    np.testing.assert_allclose(found.kl, kl.numpy(), atol=1e-12 * spread)
    np.testing.assert_allclose(found.base_surprise, -log_p[range(rows), came].numpy(), atol=1e-12 * spread)
    np.testing.assert_allclose(found.release_surprise, -log_q[range(rows), came].numpy(), atol=1e-12 * spread)
    assert found.is_top1_same.tolist() == (base.argmax(-1) == release.argmax(-1)).tolist()


def test_equal_models_have_no_kl_and_worse_ones_a_known_one() -> None:
    base = torch.tensor([[0.0, 0.0], [3.0, -1.0]])
    same = score_logits(base, base + 5, torch.tensor([0, 1]))
    np.testing.assert_allclose(same.kl, 0, atol=1e-12)
    assert same.is_top1_same.all()
    # KL of (1/2, 1/2) to (3/4, 1/4), by hand.
    other = score_logits(torch.zeros(1, 2), torch.tensor([[3.0, 1.0]]).log(), torch.tensor([1]))
    np.testing.assert_allclose(other.kl, [0.5 * np.log(0.5 / 0.75) + 0.5 * np.log(0.5 / 0.25)], rtol=1e-7)
    np.testing.assert_allclose(other.release_surprise, [np.log(4)], rtol=1e-7)


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


def test_nearly_equal_logits_are_told_apart() -> None:
    """Two words an ulp apart: float32 log probabilities of both are the same number, and the first would win."""
    low = torch.tensor(0.1)
    high = torch.nextafter(low, torch.tensor(1.0))
    base, release = torch.stack([low, high])[None], torch.stack([high, low])[None]
    assert base.log_softmax(-1)[0, 0] == base.log_softmax(-1)[0, 1]
    assert not score_logits(base, release, torch.tensor([0])).is_top1_same[0]


def interval_of(sums: np.ndarray, tokens: np.ndarray, draws: Resampling) -> Interval:
    return mean_intervals(sums[None], tokens, draws)[0]


def skewed_documents(generator: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Sums and tokens of documents as KL has them: skewed tokens, some documents worse, any length; true mean 0.039."""
    tokens = generator.integers(100, 2_000, count).astype(np.float64)
    effect = np.exp(generator.normal(0, 0.5, count) - 0.125)
    return generator.gamma(0.3 * tokens) * 0.13 * effect, tokens


@pytest.mark.parametrize(("num_documents", "above", "below"), [(5, 0.15, 0.02), (10, 0.11, 0.03), (40, 0.075, 0.035)])
def test_the_interval_covers_the_mean_nearly_as_often_as_it_says(
    num_documents: int, above: float, below: float
) -> None:
    """400 data sets: how often the mean is above and below the interval. Plain percentiles of 5 documents lie below
    the mean 17 to 20 % of the time; 2.5 % is nominal.
    """
    generator = np.random.default_rng(3)
    misses = np.zeros(2)
    for seed in range(400):
        interval = interval_of(*skewed_documents(generator, num_documents), Resampling(num_documents, seed, 500))
        assert interval.low <= interval.value <= interval.high
        misses += [interval.high < 0.039, interval.low > 0.039]
    assert misses[0] / 400 <= above
    assert misses[1] / 400 <= below
    assert misses.sum() > 0


def test_ends_are_further_out_for_few_documents() -> None:
    # Student's t: 2.7764 for 4 degrees of freedom, 2.0452 for 29 (tables); Phi(-3.1041), Phi(-2.0801).
    assert tail_share(5) == pytest.approx(0.000954, rel=5e-3)
    assert tail_share(30) == pytest.approx(0.018757, rel=1e-3)
    assert tail_share(100_000) == pytest.approx(0.025, rel=1e-3)


def test_documents_are_resampled_whole() -> None:
    """Two thousand equal tokens of two documents say no more than two tokens: the interval stays wide."""
    values = np.concatenate([np.zeros(1000), np.ones(1000)])
    unit = np.repeat([0, 1], 1000)
    interval = interval_of(sums_by_unit(values, unit, 2), np.array([1000.0, 1000.0]), Resampling(2, seed=0))
    assert (interval.low, interval.value, interval.high) == (0.0, 0.5, 1.0)
    alone = interval_of(np.array([3.0]), np.array([4.0]), Resampling(1, seed=0))
    assert (alone.low, alone.value, alone.high) == (0.75, 0.75, 0.75)


def test_the_same_seed_gives_the_same_interval_whatever_is_in_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = made_scores()
    sums, tokens = sums_by_unit(scores.kl, scores.document, 8), np.full(8, 40.0)
    first = interval_of(sums, tokens, Resampling(8, seed=5))
    monkeypatch.setattr("memopt.compressor.evaluate.bootstrap.MAX_COUNTS", 8 * 7)
    assert interval_of(sums, tokens, Resampling(8, seed=5)) == first
    assert interval_of(sums, tokens, Resampling(8, seed=6)) != first


def test_exp_is_taken_of_the_ends_and_may_be_infinite() -> None:
    found = exponential(Interval(1.0, 0.5, 800.0))
    assert (found.value, found.low, found.high) == (np.exp(1.0), np.exp(0.5), np.inf)
