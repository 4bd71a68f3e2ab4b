"""DSA indexer scores on the CPU: against float64 and the model's own formula, and their refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decode_cases import IndexerCase, indexer_case
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.errors import ShapeError, UnsupportedError, UsageError
from memopt.kernels.attention import indexer_scores, indexer_scores_reference
from memopt.kernels.kv_cache.kv_load import read_indexer_keys

DTYPES = [torch.float8_e4m3fn, torch.bfloat16, torch.float32]


def _error(case: IndexerCase, found: torch.Tensor) -> float:
    """Largest error, relative to the largest sum of the terms' magnitudes: heads' weights have both signs."""
    exact = replace(case, query=case.query.to(torch.float32).double())
    wanted = exact.run(indexer_scores_reference)
    terms = replace(exact, head_weights=case.head_weights.abs()).run(indexer_scores_reference)
    assert wanted.dtype == torch.float64
    assert torch.equal(torch.isneginf(found), torch.isneginf(wanted))
    finite = torch.isfinite(wanted)
    if not bool(finite.any()):
        return 0.0
    return float((found.double() - wanted)[finite].abs().amax() / terms[finite].amax().clamp(min=1e-30))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64(dtype: torch.dtype) -> None:
    case = indexer_case((250, 64, 129, 0, 1), 32, dtype)
    found = case.run(indexer_scores)
    assert found.shape == (5, 5 * 64)
    assert _error(case, found) < 1e-6
    assert [int(torch.isfinite(row).sum()) for row in found] == [250, 64, 129, 0, 1]


def test_the_reference_is_the_models_formula() -> None:
    # transformers 5.24, GlmMoeDsaIndexer.forward: relu(q @ k.T * head_dim**-0.5), then weights * heads**-0.5.
    case = indexer_case((100,), 32, torch.float32)
    keys = read_indexer_keys(case.pool, case.paging.slots(0))
    scores = torch.relu(torch.matmul(case.query, keys.T) * 128**-0.5)
    wanted = torch.matmul((case.head_weights * 32**-0.5).unsqueeze(-2), scores).squeeze(-2)
    weights = case.head_weights * 32**-0.5 * 128**-0.5
    found = replace(case, head_weights=weights).run(indexer_scores_reference)
    assert torch.allclose(found[:, :100], wanted, rtol=1e-5, atol=1e-6)


def test_a_keys_scale_reaches_its_score_only() -> None:
    case = indexer_case((70,), 32, torch.bfloat16)
    before = case.run(indexer_scores)
    page, position = divmod(int(case.paging.slots(0)[9]), 64)
    case.pool.view(torch.float32)[page, 64 * 128 // 4 + position] *= 4
    changed = case.run(indexer_scores)
    assert torch.equal((changed != before).nonzero(), torch.tensor([[0, 9]]))
    assert torch.allclose(changed[0, 9], before[0, 9] * 4)


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=3),
    num_heads=st.integers(1, 64),
    dtype=st.sampled_from(DTYPES),
)
def test_any_lengths_and_heads(lengths: list[int], num_heads: int, dtype: torch.dtype) -> None:
    case = indexer_case(lengths, num_heads, dtype, seed=num_heads)
    assert _error(case, case.run(indexer_scores)) < 1e-6


def test_more_tokens_than_a_tile_and_a_given_output() -> None:
    case = indexer_case((8300,), 2, torch.bfloat16)
    out = torch.full((1, case.paging.block_table.shape[1] * 64), torch.nan)
    arguments = (case.query, case.head_weights, case.pool, case.paging.block_table, case.paging.num_tokens)
    assert indexer_scores.indexer_scores(*arguments, out=out) is out
    assert _error(case, out) < 1e-6


def test_a_request_has_the_same_bytes_alone() -> None:
    case = indexer_case((250, 64, 129), 32, torch.bfloat16)
    whole = case.run(indexer_scores)
    for request in range(3):
        alone = slice(request, request + 1)
        paging = replace(
            case.paging, block_table=case.paging.block_table[alone], num_tokens=case.paging.num_tokens[alone]
        )
        one = replace(case, query=case.query[alone], head_weights=case.head_weights[alone], paging=paging)
        assert torch.equal(one.run(indexer_scores)[0], whole[request])


def test_refusals_name_what_does_not_fit() -> None:
    case = indexer_case((70, 3), 32, torch.bfloat16)
    with pytest.raises(ShapeError, match=r"head_weights is \[2, 31\], but \[2, 32\]"):
        replace(case, head_weights=case.head_weights[:, :31].contiguous()).run(indexer_scores)
    with pytest.raises(ShapeError, match=r"query \[any, any, 128\] is uint8"):
        replace(case, query=torch.zeros((2, 32, 128), dtype=torch.uint8)).run(indexer_scores)
    wide = torch.zeros((2, 65, 128))
    with pytest.raises(UnsupportedError, match="65 heads"):
        replace(case, query=wide, head_weights=torch.zeros((2, 65))).run(indexer_scores)
    case.paging.block_table[1, 0] = -3
    with pytest.raises(UsageError, match="page 0 of request 1 is -3"):
        case.run(indexer_scores)
