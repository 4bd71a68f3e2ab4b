"""Deterministic top-k on the CPU: against sorting, with ties, zeros of both signs, infinities and NaN."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.errors import ShapeError, UnsupportedError, UsageError
from memopt.kernels.attention import top_k, top_k_cpu, top_k_reference

# Few values, so that ties are the rule.
VALUES = [0.0, -0.0, 1.0, -1.0, 1.5, math.inf, -math.inf, math.nan, -math.nan, 1e-45, -1e-45, 3.4e38]


def _by_hand(scores: list[float], k: int) -> list[int]:
    """Positions of the k largest, ascending, then -1; plain Python."""
    order = sorted(
        range(len(scores)),
        key=lambda at: (math.isnan(scores[at]), 0.0 if math.isnan(scores[at]) else -scores[at], at),
    )
    chosen = sorted(order[:k])
    return chosen + [-1] * (k - len(chosen))


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.lists(st.sampled_from(VALUES) | st.floats(width=32), max_size=40), min_size=1, max_size=3),
    k=st.integers(1, 50),
)
def test_against_plain_python(rows: list[list[float]], k: int) -> None:
    scores = torch.full((len(rows), 45), torch.inf)
    for request, row in enumerate(rows):
        scores[request, : len(row)] = torch.tensor(row)
    num_tokens = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    wanted = [_by_hand(scores[request, : len(row)].tolist(), k) for request, row in enumerate(rows)]
    assert top_k_reference.top_k(scores, num_tokens, k).tolist() == wanted
    assert top_k.top_k(scores, num_tokens, k).tolist() == wanted


def test_more_rows_than_are_sorted_at_once() -> None:
    num_rows = top_k_cpu.BLOCK_ROWS * 2 + 3
    scores = torch.randn((num_rows, 40), generator=torch.Generator().manual_seed(1)).mul_(4).round_()
    num_tokens = (torch.arange(num_rows) % 41).to(torch.int32)
    assert torch.equal(top_k.top_k(scores, num_tokens, 12), top_k_reference.top_k(scores, num_tokens, 12))


def test_many_tokens_with_ties() -> None:
    scores = torch.randn((2, 20000), generator=torch.Generator().manual_seed(0))
    scores[1] = (scores[1] * 4).round() / 4
    num_tokens = torch.tensor([20000, 19999], dtype=torch.int32)
    found = top_k.top_k(scores, num_tokens, 2048)
    assert torch.equal(found, top_k_reference.top_k(scores, num_tokens, 2048))
    assert bool((found[:, 1:] > found[:, :-1]).all())
    kept, dropped = scores[1, found[1].long()], scores[1].clone()
    dropped[found[1].long()] = -torch.inf
    threshold = kept.min()
    assert float(dropped[:19999].max()) == float(threshold)  # the tie was cut, and by position:
    tied = (scores[1, :19999] == threshold).nonzero()[:, 0]
    is_chosen = torch.isin(tied, found[1])
    num_chosen = int(is_chosen.sum())
    assert 0 < num_chosen < tied.shape[0]
    assert bool(is_chosen[:num_chosen].all())


def test_order_keys_are_ordered_as_the_scores() -> None:
    scores = torch.tensor([-math.nan, -math.inf, -3.4e38, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, 3.4e38, math.inf])
    keys = top_k_reference.order_keys(scores)
    assert keys[5] == keys[6]
    assert bool((keys[1:] >= keys[:-1]).all())
    assert keys.unique().numel() == 10


def test_a_given_output_and_an_empty_batch() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0]])
    out = torch.full((1, 2), 77, dtype=torch.int32)
    assert top_k.top_k(scores, torch.tensor([3], dtype=torch.int32), 2, out) is out
    assert out.tolist() == [[1, 2]]
    assert top_k.top_k(scores[:0], torch.zeros(0, dtype=torch.int32), 2).shape == (0, 2)
    assert top_k.top_k(scores[:, :0], torch.tensor([0], dtype=torch.int32), 2).tolist() == [[-1, -1]]


def test_refusals() -> None:
    scores, count = torch.zeros((1, 3)), torch.tensor([3], dtype=torch.int32)
    with pytest.raises(UsageError, match="k is 0"):
        top_k.top_k(scores, count, 0)
    with pytest.raises(UnsupportedError, match="k is 1048577, but at most 1048576"):
        top_k.top_k(scores, count, (1 << 20) + 1)
    with pytest.raises(UsageError, match=r"num_tokens is \[4\]"):
        top_k.top_k(scores, count + 1, 1)
    with pytest.raises(ShapeError, match=r"num_tokens is \[2\], but \[1\]"):
        top_k.top_k(scores, count.repeat(2), 1)
    with pytest.raises(ShapeError, match="float64"):
        top_k.top_k(scores.double(), count, 1)
    with pytest.raises(ShapeError, match=r"out is \[1, 3\], but \[1, 2\]"):
        top_k.top_k(scores, count, 2, torch.zeros((1, 3), dtype=torch.int32))
