"""GQA decode on the CPU: against float64 and torch's own attention, the same bytes in any batch, its refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decode_cases import GQA_FORMATS, Paging, difference, gqa_case
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.errors import ShapeError, UnsupportedError, UsageError
from memopt.kernels.attention import gqa_decode, gqa_decode_reference
from memopt.kernels.kv_cache.kv_load import read_gqa_tokens
from memopt.kernels.kv_formats import BF16, FP8_DS_MLA, FP8_E4M3, KvFormat

LENGTHS = (250, 64, 129, 0, 1)
TOLERANCE = 1e-5

each_format = pytest.mark.parametrize("kv_format", GQA_FORMATS, ids=lambda kv_format: kv_format.name)


@each_format
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(12, 1, 128), (8, 2, 64), (3, 3, 128), (34, 2, 64)]
)
def test_against_float64(kv_format: KvFormat, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    case = gqa_case(LENGTHS, num_heads, num_kv_heads, head_dim, kv_format)
    wanted = case.run(gqa_decode_reference, dtype=torch.float64)
    assert difference(case.run(gqa_decode, dtype=torch.float32), wanted) < TOLERANCE
    assert difference(case.run(gqa_decode), wanted) < 0.005  # bfloat16 results


@each_format
def test_the_reference_is_torchs_grouped_attention(kv_format: KvFormat) -> None:
    case = gqa_case((150,), 8, 2, 64, kv_format)
    slots = case.paging.slots(0)
    keys = read_gqa_tokens(case.key_pool, slots, kv_format, case.k_scale).double().transpose(0, 1)
    values = read_gqa_tokens(case.value_pool, slots, kv_format, case.v_scale).double().transpose(0, 1)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        case.query[0, :, None].double()[None], keys[None], values[None], scale=64**-0.5, enable_gqa=True
    )
    found = case.run(gqa_decode_reference, dtype=torch.float64)
    assert torch.allclose(found.output, wanted[:, :, 0], rtol=1e-10, atol=1e-12)


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=3),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 16),
    head_dim=st.sampled_from([64, 128]),
    kv_format=st.sampled_from(GQA_FORMATS),
)
def test_any_group(lengths: list[int], num_kv_heads: int, group: int, head_dim: int, kv_format: KvFormat) -> None:
    case = gqa_case(lengths, num_kv_heads * group, num_kv_heads, head_dim, kv_format, group, torch.float32)
    assert difference(case.run(gqa_decode), case.run(gqa_decode_reference, dtype=torch.float64)) < TOLERANCE


def test_more_tokens_than_a_tile() -> None:
    case = gqa_case((2100,), 2, 1, 64, FP8_E4M3, dtype=torch.float32)
    assert difference(case.run(gqa_decode), case.run(gqa_decode_reference, dtype=torch.float64)) < TOLERANCE


@each_format
def test_a_request_has_the_same_bytes_alone_and_in_any_batch(kv_format: KvFormat) -> None:
    case = gqa_case(LENGTHS, 12, 2, 128, kv_format, dtype=torch.float32)
    whole = case.run(gqa_decode, num_splits=2)
    for request in range(len(LENGTHS)):
        alone = slice(request, request + 1)
        paging = Paging(case.paging.block_table[alone], case.paging.num_tokens[alone], case.paging.num_pages)
        one = replace(case, query=case.query[alone], paging=paging).run(gqa_decode)
        assert torch.equal(one.output[0], whole.output[request])
        assert torch.equal(one.log_sum_exp[0], whole.log_sum_exp[request])


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_each_heads_scale_reaches_its_heads_only(name: str) -> None:
    case = gqa_case((70,), 4, 2, 64, FP8_E4M3, dtype=torch.float32)
    before = case.run(gqa_decode)
    getattr(case, name)[1] *= 8
    changed = case.run(gqa_decode)
    assert torch.equal(changed.output[:, :2], before.output[:, :2])
    assert float((changed.output - before.output)[:, 2:].abs().amax()) > 0.01
    assert difference(changed, case.run(gqa_decode_reference, dtype=torch.float64)) < TOLERANCE


def test_refusals_name_what_does_not_fit() -> None:
    case = gqa_case((70, 3), 8, 2, 64, FP8_E4M3)
    with pytest.raises(ShapeError, match=r"query \[2, 7, 64\] does not fit key_pool \[5, 64, 2, 64\]"):
        replace(case, query=case.query[:, :7].contiguous()).run(gqa_decode)
    with pytest.raises(ShapeError, match=r"value_pool is \[5, 64, 1, 64\], but \[any, 64, 2, 64\]"):
        replace(case, value_pool=case.value_pool[:, :, :1].contiguous()).run(gqa_decode)
    with pytest.raises(ShapeError, match="key_pool has 5 pages, but value_pool has 4"):
        replace(case, value_pool=case.value_pool[:4]).run(gqa_decode)
    with pytest.raises(ShapeError, match="v_scale"):
        replace(case, v_scale=None).run(gqa_decode)
    with pytest.raises(ShapeError, match="bfloat16"):
        replace(case, kv_format=BF16, k_scale=None, v_scale=None).run(gqa_decode)
    with pytest.raises(UnsupportedError, match="holds MLA latents"):
        replace(case, kv_format=FP8_DS_MLA).run(gqa_decode)
    with pytest.raises(UnsupportedError, match="heads of 32 elements have no kernel"):
        gqa_case((70,), 8, 2, 32, BF16).run(gqa_decode)
    case.paging.block_table[1, 0] = 9
    with pytest.raises(UsageError, match="page 0 of request 1 is 9, but the pool has 5 pages"):
        case.run(gqa_decode)
