"""Triton GQA decode against float64: formats, groups, splits, page tables; what must not be read is NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decode_cases import GQA_FORMATS, Paging, difference, gqa_case

from memopt.kernels.attention import gqa_decode_reference, gqa_decode_triton
from memopt.kernels.kv_formats import FP8_E4M3, KvFormat

# Probabilities are rounded to 11 bits (float16: by 4.9e-4 of each at most) or 8 (BF16: 3.9e-3).
TOLERANCE = {"bf16": 4e-3, "fp8_e4m3": 5e-4}

each_format = pytest.mark.parametrize("kv_format", GQA_FORMATS, ids=lambda kv_format: kv_format.name)


@each_format
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "num_splits"),
    [(12, 1, 128, 1), (12, 1, 128, 2), (2, 2, 64, 7), (17, 1, 64, 1), (8, 1, 128, 1)],
)
def test_against_float64(
    kv_format: KvFormat, num_heads: int, num_kv_heads: int, head_dim: int, num_splits: int
) -> None:
    case = gqa_case((200, 64, 0, 1), num_heads, num_kv_heads, head_dim, kv_format)
    found = case.run(gqa_decode_triton, num_splits, torch.float32)
    assert difference(found, case.run(gqa_decode_reference, dtype=torch.float64)) < TOLERANCE[kv_format.name]


@each_format
def test_the_tiles_of_an_amd_gpu(kv_format: KvFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gqa_decode_triton, "gpu_family", lambda _: "amd")
    case = gqa_case((150, 3), 4, 1, 64, kv_format)
    found = case.run(gqa_decode_triton, 2, torch.float32)
    assert difference(found, case.run(gqa_decode_reference, dtype=torch.float64)) < TOLERANCE[kv_format.name]


@each_format
@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_request_has_the_same_bytes_alone_and_in_any_batch(kv_format: KvFormat, num_splits: int) -> None:
    case = gqa_case((250, 64, 1), 12, 1, 128, kv_format)
    whole = case.run(gqa_decode_triton, num_splits)
    alone = slice(0, 1)
    paging = Paging(
        case.paging.block_table[alone, :4].contiguous(), case.paging.num_tokens[alone], case.paging.num_pages
    )
    one = replace(case, query=case.query[alone], paging=paging).run(gqa_decode_triton, num_splits)
    assert torch.equal(one.output[0], whole.output[0])
    assert torch.equal(one.log_sum_exp[0], whole.log_sum_exp[0])


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_each_heads_scale_reaches_its_heads_only(name: str) -> None:
    case = gqa_case((70,), 4, 2, 64, FP8_E4M3)
    before = case.run(gqa_decode_triton, dtype=torch.float32)
    getattr(case, name)[1] *= 8
    changed = case.run(gqa_decode_triton, dtype=torch.float32)
    assert torch.equal(changed.output[:, :2], before.output[:, :2])
    assert difference(changed, before) > 0.1
    assert difference(changed, case.run(gqa_decode_reference, dtype=torch.float64)) < TOLERANCE["fp8_e4m3"]


def test_queries_beyond_the_range_of_float16() -> None:
    case = gqa_case((70,), 4, 1, 64, FP8_E4M3)
    query = case.query.float()
    large = replace(case, query=query * 2.0**60, k_scale=case.k_scale * 2.0**-60 if case.k_scale is not None else None)
    wanted = case.run(gqa_decode_reference, dtype=torch.float64)
    assert difference(large.run(gqa_decode_triton), wanted) < TOLERANCE["fp8_e4m3"]


@each_format
def test_pages_that_are_not_in_the_pool_do_not_count(kv_format: KvFormat) -> None:
    case = gqa_case((192, 128), 4, 1, 64, kv_format)
    case.paging.block_table[0, 2] = case.paging.num_pages
    case.paging.block_table[1, :2] = -1
    found = case.run(gqa_decode_triton)
    case.paging.num_tokens[0] = 128
    assert torch.equal(found.output[0], case.run(gqa_decode_triton).output[0])
    assert torch.equal(found.output[1], torch.zeros_like(found.output[1]))


def test_an_empty_batch() -> None:
    assert gqa_case((), 8, 1, 64, FP8_E4M3).run(gqa_decode_triton).output.shape == (0, 8, 64)


def test_strided_pools_and_pages_past_two_gib() -> None:
    small = gqa_case((70,), 4, 1, 64, FP8_E4M3)
    num_pages = (1 << 31) // (2 * 64 * 64) + 3
    table = small.paging.block_table[0]
    pools = []
    for source in (small.key_pool, small.value_pool):
        pool = torch.empty((num_pages, 2, 64, 1, 64), dtype=torch.uint8)[:, 1]
        pool[num_pages - 1], pool[0] = source[table[0]], source[table[1]]
        pools.append(pool)
    paging = Paging(torch.tensor([[num_pages - 1, 0]], dtype=torch.int32), small.paging.num_tokens, num_pages)
    far = replace(small, key_pool=pools[0], value_pool=pools[1], paging=paging)
    assert torch.equal(far.run(gqa_decode_triton).output, small.run(gqa_decode_triton).output)
