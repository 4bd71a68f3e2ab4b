"""MLA decode on the CPU: against float64 and torch's own attention, the same bytes in any batch, its refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_cases import (
    MLA_FORMATS,
    MlaCase,
    Paging,
    difference,
    generator,
    mla_case,
    poisoned,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.errors import MemoptError, ShapeError, UsageError
from memopt.kernels.attention import mla_decode, mla_decode_reference
from memopt.kernels.attention.attention_output import AttentionOutput
from memopt.kernels.kv_cache.kv_load import read_mla_tokens
from memopt.kernels.kv_formats import BF16, FP8_DS_MLA, FP8_E4M3, KvFormat

LENGTHS = (250, 64, 129, 0, 1)
TOLERANCE = 1e-5

each_format = pytest.mark.parametrize("kv_format", MLA_FORMATS, ids=lambda kv_format: kv_format.name)


def _equal(one: AttentionOutput, other: AttentionOutput) -> bool:
    return torch.equal(one.output, other.output) and torch.equal(one.log_sum_exp, other.log_sum_exp)


@each_format
@pytest.mark.parametrize("num_heads", [1, 8, 64])
def test_against_float64(kv_format: KvFormat, num_heads: int) -> None:
    case = mla_case(LENGTHS, num_heads, kv_format)
    wanted = case.run(mla_decode_reference, dtype=torch.float64)
    assert difference(case.run(mla_decode, dtype=torch.float32), wanted) < TOLERANCE
    assert difference(case.run(mla_decode_reference, dtype=torch.float32), wanted) < TOLERANCE
    assert difference(case.run(mla_decode), wanted) < 0.005  # bfloat16 results


@each_format
def test_the_reference_is_torchs_attention_over_the_tokens_in_order(kv_format: KvFormat) -> None:
    case = mla_case((150,), 4, kv_format)
    found = case.run(mla_decode_reference, dtype=torch.float64)
    keys = read_mla_tokens(case.pool, case.paging.slots(0), kv_format, case.scale).double()
    query = torch.cat((case.query_latent, case.query_rope), dim=2).double().transpose(0, 1)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, keys.expand(4, -1, -1), keys[:, :512].expand(4, -1, -1), scale=case.softmax_scale
    )
    assert torch.allclose(found.output, wanted.transpose(0, 1), rtol=1e-10, atol=1e-12)
    scores = query[:, 0] @ keys.T * case.softmax_scale
    assert torch.allclose(found.log_sum_exp[0].double(), scores.exp().sum(dim=1).log(), rtol=1e-6)


def test_absorbed_attention_is_attention_over_expanded_keys_and_values() -> None:
    heads, nope, value_size = 3, 192, 256
    case = mla_case((90,), heads, BF16)
    rows = read_mla_tokens(case.pool, case.paging.slots(0), BF16).double()
    latent, rope = rows.split((512, 64), dim=1)
    w_uk, w_uv = (
        torch.randn((heads, size, 512), generator=generator(size), dtype=torch.float64) / 20
        for size in (nope, value_size)
    )
    query_nope = torch.randn((heads, nope), generator=generator(3), dtype=torch.float64)
    absorbed = MlaCase(
        (query_nope[:, None] @ w_uk)[None, :, 0], case.query_rope.double(), case.pool, case.paging, BF16, None
    )
    found = absorbed.run(mla_decode_reference).output[0]

    keys = torch.cat(((w_uk @ latent.T).transpose(1, 2), rope.expand(heads, -1, -1)), dim=2)
    values = (w_uv @ latent.T).transpose(1, 2)
    query = torch.cat((query_nope, case.query_rope[0].double()), dim=1)[:, None]
    wanted = torch.nn.functional.scaled_dot_product_attention(query, keys, values, scale=case.softmax_scale)
    assert torch.allclose((w_uv @ found[:, :, None])[..., 0], wanted[:, 0], rtol=1e-9, atol=1e-10)


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=4),
    num_heads=st.integers(1, 17),
    kv_format=st.sampled_from(MLA_FORMATS),
    seed=st.integers(0, 1 << 16),
)
def test_any_lengths_and_heads(lengths: list[int], num_heads: int, kv_format: KvFormat, seed: int) -> None:
    case = mla_case(lengths, num_heads, kv_format, seed, torch.float32)
    assert difference(case.run(mla_decode), case.run(mla_decode_reference, dtype=torch.float64)) < TOLERANCE


def test_more_tokens_than_a_tile() -> None:
    case = mla_case((4500,), 2, FP8_DS_MLA)
    wanted = case.run(mla_decode_reference, dtype=torch.float64)
    assert difference(case.run(mla_decode, dtype=torch.float32), wanted) < TOLERANCE


@each_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_request_has_the_same_bytes_alone_and_in_any_batch(kv_format: KvFormat, dtype: torch.dtype) -> None:
    case = mla_case(LENGTHS, 8, kv_format, dtype=dtype)
    whole = case.run(mla_decode, num_splits=3)
    for request in range(len(LENGTHS)):
        alone = slice(request, request + 1)
        paging = Paging(case.paging.block_table[alone], case.paging.num_tokens[alone], case.paging.num_pages)
        one = MlaCase(
            case.query_latent[alone], case.query_rope[alone], case.pool, paging, kv_format, case.scale
        ).run(mla_decode)  # fmt: skip
        assert torch.equal(one.output[0], whole.output[request])
        assert torch.equal(one.log_sum_exp[0], whole.log_sum_exp[request])


def test_requests_may_share_pages() -> None:
    case = mla_case((130, 130), 4, FP8_E4M3)
    case.paging.block_table[1] = case.paging.block_table[0]
    case.query_latent[1], case.query_rope[1] = case.query_latent[0], case.query_rope[0]
    found = case.run(mla_decode)
    assert torch.equal(found.output[0], found.output[1])


def test_the_order_of_pages_is_the_order_of_tokens() -> None:
    case = mla_case((128,), 4, BF16)
    before = case.run(mla_decode, dtype=torch.float32)
    table = case.paging.block_table
    first, second = table[0, 0].clone(), table[0, 1].clone()
    table[0, 0], table[0, 1] = second, first
    swapped = case.run(mla_decode, dtype=torch.float32)
    # Attention has no order of its own, so the sum over the same tokens is the same within rounding ...
    assert difference(swapped, before) < TOLERANCE
    case.paging.num_tokens[0] = 64
    # ... but a request that ends after one page sees only the page that the table names first.
    assert difference(case.run(mla_decode, dtype=torch.float32), before) > 0.01


def test_the_scale_reaches_keys_and_values() -> None:
    case = mla_case((70,), 4, FP8_E4M3)
    assert case.scale is not None
    before = case.run(mla_decode, dtype=torch.float32)
    case.scale.mul_(2)
    doubled = case.run(mla_decode, dtype=torch.float32)
    assert difference(doubled, before) > 0.1
    assert difference(doubled, case.run(mla_decode_reference, dtype=torch.float64)) < TOLERANCE
    halved_scores = case.run(mla_decode, dtype=torch.float32, softmax_scale=case.softmax_scale / 2)
    assert torch.allclose(halved_scores.output, before.output * 2, rtol=1e-5, atol=1e-6)


def test_every_scale_of_a_token_reaches_the_result() -> None:
    case = mla_case((70,), 4, FP8_DS_MLA)
    before = case.run(mla_decode, dtype=torch.float32)
    page, position = divmod(int(case.paging.slots(0)[69]), 64)
    for group in range(4):
        scales = case.pool.view(torch.float32)[page, position, 128 + group : 129 + group]
        kept = scales.clone()
        scales.mul_(30)
        changed = case.run(mla_decode, dtype=torch.float32)
        part = slice(128 * group, 128 * (group + 1))
        assert float((changed.output - before.output)[..., part].abs().amax()) > 0.01
        assert difference(changed, case.run(mla_decode_reference, dtype=torch.float64)) < TOLERANCE
        scales.copy_(kept)


@each_format
def test_selected_tokens(kv_format: KvFormat) -> None:
    case = mla_case((250, 64, 129, 5), 8, kv_format)
    positions = torch.full((4, 80), -1, dtype=torch.int32)
    positions[0, :80] = torch.randperm(250, generator=generator(1))[:80].sort().values
    positions[1, ::2] = torch.randperm(64, generator=generator(2))[:40]
    positions[2, 79] = 128
    wanted = case.run_selected(mla_decode_reference, positions, dtype=torch.float64)
    found = case.run_selected(mla_decode, positions, dtype=torch.float32)
    assert difference(found, wanted) < TOLERANCE
    assert torch.equal(found.output[3], torch.zeros(8, 512))
    last = read_mla_tokens(case.pool, case.paging.slots(2)[128:], kv_format, case.scale)
    assert torch.allclose(found.output[2], last[:, :512].expand(8, -1), rtol=1e-6)


@each_format
def test_selecting_all_tokens_is_dense_attention(kv_format: KvFormat) -> None:
    case = mla_case((100, 3), 8, kv_format)
    positions = torch.arange(128, dtype=torch.int32).repeat(2, 1)
    positions = torch.where(positions < case.paging.num_tokens[:, None], positions, -1)
    assert _equal(case.run_selected(mla_decode, positions), case.run(mla_decode))


def test_an_empty_batch_and_requests_without_tokens() -> None:
    case = mla_case((), 8, FP8_E4M3)
    assert case.run(mla_decode).output.shape == (0, 8, 512)
    found = mla_case((0, 0), 8, FP8_E4M3).run(mla_decode)
    assert torch.equal(found.output, torch.zeros((2, 8, 512), dtype=torch.bfloat16))
    assert torch.equal(found.log_sum_exp, torch.full((2, 8), -torch.inf))


def test_a_given_output_is_written_and_returned() -> None:
    case = mla_case(LENGTHS, 8, BF16)
    out = AttentionOutput(
        poisoned(torch.empty((5, 8, 512), dtype=torch.bfloat16)), poisoned(torch.empty((5, 8), dtype=torch.float32))
    )
    found = case.run(mla_decode, out=out)
    assert found is out
    assert _equal(out, case.run(mla_decode))


def test_nan_stays_in_its_request() -> None:
    case = mla_case((70, 70), 8, FP8_DS_MLA)
    clean = case.run(mla_decode)
    case.pool[divmod(int(case.paging.slots(0)[3]), 64)] = 0xFF
    found = case.run(mla_decode)
    assert bool(found.output[0].isnan().all())
    assert torch.equal(found.output[1], clean.output[1])


def _fails(case: MlaCase, **changes: Any) -> str:
    arguments: dict[str, Any] = {
        "query_latent": case.query_latent, "query_rope": case.query_rope, "pool": case.pool,
        "block_table": case.paging.block_table, "num_tokens": case.paging.num_tokens, "kv_format": case.kv_format,
        "scale": case.scale, "softmax_scale": case.softmax_scale, **changes,
    }  # fmt: skip
    with pytest.raises(MemoptError) as caught:
        mla_decode.mla_decode(**arguments)
    assert isinstance(caught.value, ShapeError | UsageError)
    return str(caught.value)


def test_refusals_name_what_does_not_fit() -> None:
    case = mla_case((70, 3), 8, FP8_E4M3)
    assert "query_latent is [2, 8, 64], but [any, any, 512]" in _fails(case, query_latent=case.query_rope)
    assert "query_rope is [1, 8, 64], but [2, 8, 64]" in _fails(case, query_rope=case.query_rope[:1])
    assert "query_rope [2, 8, 64] is float32, but bfloat16" in _fails(case, query_rope=case.query_rope.float())
    assert "float64" in _fails(case, query_latent=case.query_latent.double())
    assert "must be contiguous" in _fails(
        case, query_latent=case.query_latent.transpose(0, 1).contiguous().transpose(0, 1)
    )
    assert "block_table is [1, 3], but [2, any]" in _fails(case, block_table=case.paging.block_table[:1])
    assert "num_tokens [2] is int64, but int32" in _fails(case, num_tokens=case.paging.num_tokens.long())
    assert "scale" in _fails(case, scale=None)
    assert "num_splits is 0" in _fails(case, num_splits=0)
    assert "request 1 has -1 tokens" in _fails(case, num_tokens=torch.tensor([3, -1], dtype=torch.int32))
    assert "request 0 has 1000 tokens" in _fails(case, num_tokens=torch.tensor([1000, 3], dtype=torch.int32))
    short = AttentionOutput(torch.empty((2, 8, 64), dtype=torch.bfloat16), torch.empty((2, 8)))
    assert "out.output is [2, 8, 64], but [2, 8, 512]" in _fails(case, out=short)


@pytest.mark.parametrize("page", [-1, 5])
def test_a_page_outside_the_pool_is_refused(page: int) -> None:
    case = mla_case((70, 3), 8, BF16)
    assert case.paging.num_pages == 5
    case.paging.block_table[0, 1] = page
    assert f"page 1 of request 0 is {page}, but the pool has 5 pages" in _fails(case)
    positions = torch.tensor([[3, -1], [0, 1]], dtype=torch.int32)
    case.run_selected(mla_decode, positions)
    positions[0, 1] = 64
    with pytest.raises(UsageError, match="page 1 of request 0"):
        case.run_selected(mla_decode, positions)
    positions[0, 1] = 192
    with pytest.raises(UsageError, match="selects position 192, but its block table of 3 pages ends at 192"):
        case.run_selected(mla_decode, positions)
