"""Triton indexer scores against float64, and Triton top-k against the reference, exactly."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from decode_cases import IndexerCase, Paging, indexer_case

from memopt.kernels.attention import indexer_scores_reference, indexer_scores_triton, top_k_reference, top_k_triton

# float32 queries are rounded to float16; the others are exact in it.
TOLERANCE = {torch.float8_e4m3fn: 1e-6, torch.bfloat16: 1e-6, torch.float32: 1e-3}


def _error(case: IndexerCase, found: torch.Tensor) -> float:
    wanted = replace(case, query=case.query.float().double()).run(indexer_scores_reference)
    assert torch.equal(torch.isneginf(found), torch.isneginf(wanted))
    finite = torch.isfinite(wanted)
    return float((found.double() - wanted)[finite].abs().amax() / wanted[finite].abs().amax())


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("num_heads", [32, 5])
def test_scores(dtype: torch.dtype, num_heads: int) -> None:
    case = indexer_case((64, 600, 0, 1), num_heads, dtype)
    out = torch.full((4, case.paging.block_table.shape[1] * 64), torch.nan)
    found = indexer_scores_triton.indexer_scores(
        case.query, case.head_weights, case.pool, case.paging.block_table, case.paging.num_tokens, out
    )
    assert found is out
    assert _error(case, found) < TOLERANCE[dtype]


def test_scores_have_the_same_bytes_in_any_batch_and_queries_may_be_large() -> None:
    case = indexer_case((150, 64), 32, torch.bfloat16)
    whole = case.run(indexer_scores_triton)
    alone = slice(0, 1)
    one = replace(
        case, query=case.query[alone] * 2.0**40, head_weights=case.head_weights[alone] * 2.0**-40,
        paging=Paging(case.paging.block_table[alone], case.paging.num_tokens[alone], case.paging.num_pages),
    )  # fmt: skip
    assert torch.equal(one.run(indexer_scores_triton)[0], whole[0])


def test_pages_that_are_not_in_the_pool_score_minus_infinity() -> None:
    case = indexer_case((150,), 32, torch.bfloat16)
    wanted = case.run(indexer_scores_triton)
    case.paging.block_table[0, 1] = case.paging.num_pages
    wanted[0, 64:128] = -torch.inf
    assert torch.equal(case.run(indexer_scores_triton), wanted)


def test_a_nan_key_scores_nan_and_no_other_does() -> None:
    case = indexer_case((70,), 32, torch.bfloat16)
    page, position = divmod(int(case.paging.slots(0)[9]), 64)
    case.pool[page, position * 128] = 0x7F
    assert case.run(indexer_scores_triton).isnan().nonzero().tolist() == [[0, 9]]


def test_pages_past_two_gib() -> None:
    small = indexer_case((70,), 32, torch.bfloat16)
    num_pages = (1 << 31) // small.pool.shape[1] + 3
    pool = torch.empty((num_pages, small.pool.shape[1]), dtype=torch.uint8)
    table = small.paging.block_table[0]
    pool[num_pages - 1], pool[0] = small.pool[table[0]], small.pool[table[1]]
    pages = torch.tensor([[num_pages - 1, 0, 0]], dtype=torch.int32)
    far = replace(small, pool=pool, paging=Paging(pages, small.paging.num_tokens, num_pages))
    assert torch.equal(far.run(indexer_scores_triton), small.run(indexer_scores_triton))


@pytest.mark.parametrize("k", [7, 2048])
def test_top_k(k: int) -> None:
    scores = torch.randn(6, 9000)
    scores[1] = (scores[1] * 2).round() / 2
    scores[2] = torch.where(torch.rand(9000) < 0.5, 0.0, -0.0)
    special = [math.nan, -math.nan, math.inf, -math.inf, 1e-45, -1e-45, 0.0, -0.0, 3.4e38, -3.4e38]
    scores[3] = torch.tensor(special)[torch.randint(10, (9000,))]
    scores[4] = torch.randint(-(1 << 31), 1 << 31, (9000,)).to(torch.int32).view(torch.float32)
    num_tokens = torch.tensor([9000, 8999, 5000, 4097, 8192, 0], dtype=torch.int32)
    wanted = top_k_reference.top_k(scores, num_tokens, k)
    found = top_k_triton.top_k(scores, num_tokens, k, torch.full((6, k), 77, dtype=torch.int32))
    assert torch.equal(found, wanted)


def test_top_k_of_few_tokens_and_of_an_empty_batch() -> None:
    scores, num_tokens = torch.randn(3, 64), torch.tensor([64, 3, -9], dtype=torch.int32)
    found = top_k_triton.top_k(scores, num_tokens, 50)
    assert torch.equal(found, top_k_reference.top_k(scores, num_tokens.clamp(min=0), 50))
    assert top_k_triton.top_k(scores[:0], num_tokens[:0], 50).shape == (0, 50)
    # A number past the scores is brought into their range.
    assert torch.equal(
        top_k_triton.top_k(scores[:1], torch.tensor([999], dtype=torch.int32), 5),
        top_k_reference.top_k(scores[:1], torch.tensor([64], dtype=torch.int32), 5),
    )
