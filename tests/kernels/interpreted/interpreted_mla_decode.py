"""Triton MLA decode against float64: formats, heads, splits, page tables, selections; what must not be read is NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decode_cases import MLA_FORMATS, MlaCase, Paging, difference, mla_case, poisoned

from memopt.kernels.attention import mla_decode_reference, mla_decode_triton, split_merge_reference, split_merge_triton
from memopt.kernels.attention.attention_output import AttentionOutput, new_output
from memopt.kernels.kv_cache.kv_load import read_mla_tokens
from memopt.kernels.kv_formats import BF16, FP8_DS_MLA, FP8_E4M3, KvFormat

LENGTHS = (150, 64, 0, 1)
# Probabilities are rounded to 11 bits (float16: by 4.9e-4 of each at most) or 8 (BF16: 3.9e-3).
TOLERANCE = {"bf16": 4e-3, "fp8_e4m3": 5e-4, "fp8_ds_mla": 6e-4}

each_format = pytest.mark.parametrize("kv_format", MLA_FORMATS, ids=lambda kv_format: kv_format.name)


def _poisoned_output(case: MlaCase, dtype: torch.dtype = torch.float32) -> AttentionOutput:
    out = new_output(case.query_latent.to(dtype), 512)
    return AttentionOutput(poisoned(out.output), poisoned(out.log_sum_exp))


def _error(case: MlaCase, num_splits: int = 1) -> float:
    found = case.run(mla_decode_triton, num_splits, torch.float32, out=_poisoned_output(case))
    return difference(found, case.run(mla_decode_reference, dtype=torch.float64))


@each_format
@pytest.mark.parametrize("num_splits", [1, 2, 7])
def test_splits(kv_format: KvFormat, num_splits: int) -> None:
    lengths = LENGTHS if num_splits == 1 else (150, 0)
    assert _error(mla_case(lengths, 8, kv_format), num_splits) < TOLERANCE[kv_format.name]


@each_format
@pytest.mark.parametrize("num_heads", [1, 64])
def test_heads(kv_format: KvFormat, num_heads: int) -> None:
    assert _error(mla_case((70,), num_heads, kv_format)) < TOLERANCE[kv_format.name]


@each_format
def test_the_tiles_of_an_amd_gpu(kv_format: KvFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_decode_triton, "gpu_family", lambda _: "amd")
    assert _error(mla_case((150, 33), 8, kv_format), 2) < TOLERANCE[kv_format.name]


@each_format
def test_bf16_results_are_rounded_once(kv_format: KvFormat) -> None:
    case = mla_case((70, 0), 8, kv_format)
    exact = case.run(mla_decode_triton, dtype=torch.float32)
    found = case.run(mla_decode_triton, out=_poisoned_output(case, torch.bfloat16))
    assert torch.equal(found.output, exact.output.to(torch.bfloat16))
    assert torch.equal(found.log_sum_exp, exact.log_sum_exp)


@each_format
@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_request_has_the_same_bytes_alone_and_in_any_batch(kv_format: KvFormat, num_splits: int) -> None:
    case = mla_case((150, 3), 8, kv_format)
    whole = case.run(mla_decode_triton, num_splits)
    alone = slice(0, 1)
    table = case.paging.block_table[alone, :3].contiguous()  # a narrower table, too
    one = replace(
        case, query_latent=case.query_latent[alone], query_rope=case.query_rope[alone],
        paging=Paging(table, case.paging.num_tokens[alone], case.paging.num_pages),
    ).run(mla_decode_triton, num_splits)  # fmt: skip
    assert torch.equal(one.output[0], whole.output[0])
    assert torch.equal(one.log_sum_exp[0], whole.log_sum_exp[0])


@each_format
@pytest.mark.parametrize("power", [-115, 100])
def test_queries_beyond_the_range_of_float16(kv_format: KvFormat, power: int) -> None:
    case = mla_case((70,), 8, kv_format)
    latent, rope = (query.float() * 2.0**power for query in (case.query_latent, case.query_rope))
    scaled = replace(case, query_latent=latent, query_rope=rope, softmax_scale=case.softmax_scale * 2.0**-power)
    wanted = case.run(mla_decode_reference, dtype=torch.float64)
    assert difference(scaled.run(mla_decode_triton), wanted) < TOLERANCE[kv_format.name]


@each_format
@pytest.mark.parametrize("power", [-30, 30])
def test_latent_and_rope_queries_of_any_ratio(kv_format: KvFormat, power: int) -> None:
    case = mla_case((70,), 8, kv_format)
    factor = 2.0**power
    latent, rope = case.query_latent * factor, case.query_rope * factor**-1
    scaled = replace(case, query_latent=latent, query_rope=rope, softmax_scale=case.softmax_scale * 2.0**-30)
    assert _error(scaled) < TOLERANCE[kv_format.name]


def test_a_token_of_large_scale_leaves_the_others_their_precision() -> None:
    # Weights p * s / u of the other tokens are 2**-24 and less, float16's smallest number.
    case = mla_case((200,), 8, FP8_DS_MLA)
    page, position = divmod(int(case.paging.slots(0)[20]), 64)
    case.pool[page, position, :512] = 0
    case.pool.view(torch.float32)[page, position, 128:132] *= 2.0**20
    assert _error(replace(case, query_latent=case.query_latent / 64)) < TOLERANCE["fp8_ds_mla"]


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**90])
def test_scales_that_are_all_tiny_or_all_huge(scale: float) -> None:
    case = mla_case((70,), 8, FP8_DS_MLA)
    case.pool.view(torch.float32)[..., 128:132] = scale
    assert _error(replace(case, query_latent=case.query_latent / max(scale, 1.0))) < TOLERANCE["fp8_ds_mla"]


def test_the_largest_scales_that_there_are() -> None:
    # Their products with a query are beyond float32, so the query is zero: the result is the average of the values.
    case = mla_case((70,), 8, FP8_DS_MLA)
    case.pool[..., :512] = (torch.arange(512) % 8).to(torch.uint8)
    case.pool.view(torch.float32)[..., 128:132] = 1.5 * 2.0**127
    zero = replace(case, query_latent=case.query_latent * 0)
    assert _error(zero) < TOLERANCE["fp8_ds_mla"]


@each_format
def test_scores_far_below_zero(kv_format: KvFormat) -> None:
    case = mla_case((1,), 8, kv_format)
    row = read_mla_tokens(case.pool, case.paging.slots(0), kv_format, case.scale)[0]
    against = replace(case, query_latent=(row[:512] * -16).expand(1, 8, 512).to(torch.bfloat16).contiguous())
    found = against.run(mla_decode_triton, dtype=torch.float32)
    wanted = against.run(mla_decode_reference, dtype=torch.float64)
    assert float(wanted.log_sum_exp.max()) < -200
    assert difference(found, wanted) < TOLERANCE[kv_format.name]


def test_zero_queries_average_the_tokens() -> None:
    case = mla_case((70,), 8, FP8_DS_MLA)
    zero = replace(case, query_latent=case.query_latent * 0, query_rope=case.query_rope * 0)
    assert _error(zero) < TOLERANCE["fp8_ds_mla"]


@pytest.mark.parametrize("power", [-100, 100])
def test_group_scales_of_any_size(power: int) -> None:
    case = mla_case((200,), 8, FP8_DS_MLA)
    scales = case.pool.view(torch.float32)[..., 128:132]
    scales.mul_(2.0**power)
    # One token far below the others, one group of zeros with the smallest scale that a store writes.
    page, position = divmod(int(case.paging.slots(0)[150]), 64)
    scales[page, position, 0] *= 2.0**-20
    case.pool[page, position, 128:256] = 0
    scales[page, position, 1] = 2.0**-126
    assert _error(replace(case, query_latent=case.query_latent * 2.0**-power)) < TOLERANCE["fp8_ds_mla"]


def test_scales_reach_the_kernel() -> None:
    case = mla_case((70,), 8, FP8_E4M3)
    before = case.run(mla_decode_triton, dtype=torch.float32)
    assert case.scale is not None
    case.scale.mul_(2)
    assert difference(case.run(mla_decode_triton, dtype=torch.float32), before) > 0.1
    assert _error(case) < TOLERANCE["fp8_e4m3"]


@each_format
@pytest.mark.parametrize(("num_heads", "num_splits"), [(8, 2), (16, 1)])
def test_selected_tokens(kv_format: KvFormat, num_heads: int, num_splits: int) -> None:
    case = mla_case((150, 64, 129), num_heads, kv_format)
    positions = torch.full((3, 80), -1, dtype=torch.int32)
    positions[0, :80] = torch.randperm(150)[:80].sort().values
    positions[1, 2:42] = torch.randperm(64)[:40]
    found = case.run_selected(mla_decode_triton, positions, num_splits, torch.float32)
    wanted = case.run_selected(mla_decode_reference, positions, dtype=torch.float64)
    assert difference(found, wanted) < TOLERANCE[kv_format.name]


@each_format
def test_tokens_that_lie_nowhere_do_not_count(kv_format: KvFormat) -> None:
    case = mla_case((128, 128), 8, kv_format)
    wanted = case.run(mla_decode_triton)
    case.paging.block_table[1, :2] = torch.tensor([case.paging.num_pages, -1])
    found = case.run(mla_decode_triton)
    assert torch.equal(found.output[0], wanted.output[0])
    assert torch.equal(found.output[1], torch.zeros_like(found.output[1]))
    positions = torch.tensor([[1, 10**6, -5], [0, 64, 100]], dtype=torch.int32)
    selected = case.run_selected(mla_decode_triton, positions)
    positions[0, 1:] = -1
    first = MlaCase(
        case.query_latent[:1], case.query_rope[:1], case.pool,
        Paging(case.paging.block_table[:1], case.paging.num_tokens[:1], case.paging.num_pages), kv_format, case.scale,
    )  # fmt: skip
    assert torch.equal(selected.output[0], first.run_selected(mla_decode_triton, positions[:1]).output[0])
    assert torch.equal(selected.output[1], torch.zeros_like(found.output[1]))


def test_a_number_of_tokens_outside_the_table_is_brought_into_it() -> None:
    case = mla_case((192, 64), 8, BF16)
    case.paging.block_table[0, 3] = case.paging.block_table[0, 0]
    wanted = case.run(mla_decode_triton).output[0]
    case.paging.num_tokens[:] = torch.tensor([192 + 64, -70])
    whole = case.run(mla_decode_triton).output[0]
    case.paging.num_tokens[0] = 1 << 30
    found = case.run(mla_decode_triton)
    assert torch.equal(found.output[0], whole)
    assert not torch.equal(whole, wanted)
    assert torch.equal(found.output[1], torch.zeros_like(found.output[1]))


def test_an_empty_batch() -> None:
    assert mla_case((), 8, BF16).run(mla_decode_triton).output.shape == (0, 8, 512)


def test_strided_pools_and_pages_past_two_gib() -> None:
    # 2.1 GB of address space, of which only the pages written to take memory; the pool is every other page of it.
    small = mla_case((70,), 8, FP8_DS_MLA)
    num_pages = (1 << 31) // (2 * 64 * 656) + 3
    pool = torch.empty((num_pages, 2, 64, 656), dtype=torch.uint8)[:, 1]
    pages = torch.tensor([[num_pages - 1, 0]], dtype=torch.int32)
    pool[num_pages - 1], pool[0] = (
        small.pool[small.paging.block_table[0, 0]],
        small.pool[small.paging.block_table[0, 1]],
    )
    far = replace(small, pool=pool, paging=Paging(pages, small.paging.num_tokens, num_pages))
    assert torch.equal(far.run(mla_decode_triton).output, small.run(mla_decode_triton).output)
    positions = torch.tensor([[5, 69, 2]], dtype=torch.int32)
    assert torch.equal(
        far.run_selected(mla_decode_triton, positions).output, small.run_selected(mla_decode_triton, positions).output
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_merging_splits(dtype: torch.dtype) -> None:
    partial, log_sum_exps = torch.randn(3, 5, 4, 512), torch.randn(3, 5, 4) * 20
    log_sum_exps[0, 2], partial[0, 2] = -torch.inf, torch.nan
    log_sum_exps[1] = -torch.inf
    query = torch.empty((3, 4, 1), dtype=dtype)
    found = split_merge_triton.merge_splits(partial, log_sum_exps, new_output(query, 512))
    wanted = split_merge_reference.merge_splits(partial, log_sum_exps, new_output(query.double(), 512))
    assert difference(found, wanted) < (5e-3 if dtype == torch.bfloat16 else 1e-5)
