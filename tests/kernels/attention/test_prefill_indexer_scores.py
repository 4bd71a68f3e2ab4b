"""Indexer scores of a prompt's chunk against those of single rows, and bits whatever the cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from decode_cases import generator, poisoned
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.errors import ShapeError
from memopt.kernels.attention.indexer_scores_reference import indexer_scores
from memopt.kernels.attention.prefill_indexer_scores import prefill_indexer_scores
from memopt.kernels.attention.prefill_indexer_scores_cpu import KEY_TILE
from memopt.kernels.kv_cache.kv_format import new_indexer_pool
from memopt.kernels.kv_cache.kv_slots import slots_of_pages
from memopt.kernels.kv_cache.kv_store import indexer_store
from memopt.kernels.kv_formats import FP32
from memopt.kernels.layout import INDEXER_KEY_SIZE, PAGE_TOKENS

TOKENS, HEADS = KEY_TILE + 90, 5
NUM_PAGES = -(-TOKENS // PAGE_TOKENS)
PAGES = torch.randperm(NUM_PAGES + 3, generator=generator(1))[:NUM_PAGES].to(torch.int32)
QUERY = torch.randn((TOKENS, HEADS, INDEXER_KEY_SIZE), generator=generator(2))
WEIGHTS = torch.randn((TOKENS, HEADS), generator=generator(3))


def filled_pool(is_float: bool = False) -> torch.Tensor:
    """A pool of poisoned pages that holds the keys of TOKENS tokens."""
    pool = poisoned(new_indexer_pool(NUM_PAGES + 3, kv_format=FP32 if is_float else None))
    keys = torch.randn((TOKENS, INDEXER_KEY_SIZE), generator=generator(4))
    indexer_store(keys, pool, slots_of_pages(PAGES, TOKENS))
    return pool


POOL = filled_pool()


@pytest.mark.parametrize("is_float", [False, True])
@pytest.mark.parametrize(("first", "after"), [(0, 1), (3, 40), (KEY_TILE - 3, TOKENS)])
def test_equals_scores_of_single_rows(first: int, after: int, is_float: bool) -> None:
    pool, rows = filled_pool(is_float), slice(first, after)
    found = prefill_indexer_scores(QUERY[rows], WEIGHTS[rows], pool, PAGES, first)
    counts = torch.arange(first + 1, after + 1, dtype=torch.int32)
    table = PAGES[None].expand(after - first, -1).contiguous()
    wanted = indexer_scores(QUERY[rows].double(), WEIGHTS[rows], pool, table, counts)
    width = min(found.shape[1], wanted.shape[1])
    assert width >= after
    assert bool(torch.isneginf(found[:, width:]).all())
    found, wanted = found[:, :width].double(), wanted[:, :width]
    assert torch.equal(torch.isneginf(found), torch.isneginf(wanted))
    difference = torch.where(torch.isneginf(wanted), 0.0, found - wanted)
    assert float(difference.abs().max()) < 1e-4


@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(1, TOKENS - 1), max_size=4, unique=True))
def test_bits_do_not_depend_on_the_cut(cuts: list[int]) -> None:
    whole = prefill_indexer_scores(QUERY, WEIGHTS, POOL, PAGES, 0)
    edges = [0, *sorted(cuts), TOKENS]
    for first, after in pairwise(edges):
        part = prefill_indexer_scores(QUERY[first:after], WEIGHTS[first:after], POOL, PAGES, first)
        assert torch.equal(part, whole[first:after, : part.shape[1]])


def test_a_chunk_past_its_pages_is_refused() -> None:
    with pytest.raises(ShapeError, match="2 queries from position 63 do not fit 1 pages"):
        prefill_indexer_scores(QUERY[:2], WEIGHTS[:2], POOL, PAGES[:1], 63)
