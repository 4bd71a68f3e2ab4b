"""The INT4 GEMM on the CPU in its three forms against float64, and what its wrapper refuses."""

from __future__ import annotations

import pytest
import torch
from gemm_cases import BF16_TOLERANCE, exact_values, largest_error, random_weight, weights
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.errors import ShapeError, UnsupportedError, UsageError
from memopt.kernels.gemm.int4_gemm import int4_gemm
from memopt.kernels.gemm.int4_gemm_cpu import int4_gemm_cpu
from memopt.kernels.gemm.int4_gemm_reference import int4_gemm_reference
from memopt.kernels.gemm.int4_gemm_triton import ENOUGH_CTAS, blocks_per_split
from memopt.kernels.gemm.int4_weight import Int4Weight
from memopt.kernels.gemm.planar import planar_weight
from memopt.kernels.gemm.torch_int4_weight import torch_int4_weight


@settings(max_examples=40, deadline=None)
@given(weight=weights(planar=False), num_tokens=st.integers(0, 18))
def test_the_checkpoint_form_is_exact_to_float32_sums(weight: Int4Weight, num_tokens: int) -> None:
    x = torch.randn(num_tokens, weight.num_columns)
    expected = x.double() @ exact_values(weight).T
    for result in (int4_gemm(x, weight), int4_gemm_reference(x, weight, torch.empty(num_tokens, weight.num_rows))):
        assert result.dtype == torch.float32
        assert largest_error(result, expected) < 2e-4


@pytest.mark.parametrize("group", [32, 64, 128, None])
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 17])
def test_every_form_gives_bf16_of_the_exact_product(group: int | None, num_tokens: int) -> None:
    weight = random_weight(48, 384, group)
    x = torch.randn(num_tokens, 384).to(torch.bfloat16)
    expected = x.double() @ exact_values(weight).T
    for form in (weight, planar_weight(weight), torch_int4_weight(weight)):
        out = torch.full((num_tokens, 48), torch.nan, dtype=torch.bfloat16)
        result = int4_gemm(x, form, out)
        assert result is out
        assert largest_error(result, expected) < BF16_TOLERANCE, type(form).__name__


def test_a_weight_of_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(70, 320, 64)
    x = torch.randn(3, 320)
    whole = int4_gemm(x, weight)
    monkeypatch.setattr("memopt.kernels.gemm.int4_gemm_cpu.TILE_WEIGHTS", 320 * 16)
    parts = int4_gemm_cpu(x, weight, torch.full((3, 70), torch.nan))
    assert largest_error(parts, x.double() @ exact_values(weight).T) < 2e-4
    assert largest_error(parts, whole.double()) < 2e-4


def test_a_row_longer_than_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memopt.kernels.gemm.int4_gemm_cpu.TILE_WEIGHTS", 8)
    weight = random_weight(3, 64, 32)
    x = torch.randn(2, 64)
    assert largest_error(int4_gemm(x, weight), x.double() @ exact_values(weight).T) < 2e-4


def test_scale_bits_may_be_integers() -> None:
    weight = random_weight(16, 64, 32)
    as_bits = Int4Weight(weight.packed, weight.scale_bits.view(torch.int16), 32)
    x = torch.randn(2, 64)
    assert torch.equal(int4_gemm(x, weight), int4_gemm(x, as_bits))
    assert torch.equal(int4_gemm(x, torch_int4_weight(weight)), int4_gemm(x, torch_int4_weight(as_bits)))


def test_infinite_x_stays_where_it_is() -> None:
    weight = random_weight(16, 64, 32)
    x = torch.zeros(2, 64)
    x[0, 5] = torch.inf
    for form in (weight, planar_weight(weight)):
        result = int4_gemm(x, form)
        assert not bool(result[0].isfinite().all())
        assert not bool(result[1].any())


@given(num_rows=st.integers(1, 30000), num_blocks=st.integers(1, 80))
def test_a_split_of_k_leaves_no_part_empty_and_no_device_idle(num_rows: int, num_blocks: int) -> None:
    size = blocks_per_split(num_rows, num_blocks)
    splits = -(-num_blocks // size)
    assert 1 <= size <= num_blocks
    assert (splits - 1) * size < num_blocks
    assert splits == 1 or size >= 2
    row_tiles = -(-num_rows // 64)
    assert splits == 1 or row_tiles < ENOUGH_CTAS
    # Half of what is wanted is reached wherever two blocks a part allow it.
    assert 2 * row_tiles * splits >= min(ENOUGH_CTAS, row_tiles * (num_blocks // 2))


def test_what_torch_does_not_take() -> None:
    for weight in (random_weight(24, 64, 32), random_weight(16, 40, None), random_weight(16, 96, 48)):
        with pytest.raises(UnsupportedError, match=r"does not take \[\d+, \d+\]"):
            torch_int4_weight(weight)


def test_sizes_count_codes_and_scales() -> None:
    weight = random_weight(16, 256, 32)
    assert weight.size_bytes == 16 * 256 // 2 + 16 * 8 * 2
    assert planar_weight(weight).size_bytes == weight.size_bytes
    assert torch_int4_weight(weight).size_bytes == weight.size_bytes + 16 * 8 * 2  # torch keeps a zero beside a scale


def test_shapes_that_do_not_fit_are_refused() -> None:
    weight = random_weight(16, 64, 32)
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    for form in (weight, planar_weight(weight), torch_int4_weight(weight)):
        with pytest.raises(ShapeError, match=r"x is \[2, 32\], but \[any, 64\]"):
            int4_gemm(x[:, :32], form)
        with pytest.raises(ShapeError, match="float16"):
            int4_gemm(x.to(torch.float16), form)
        with pytest.raises(ShapeError, match="strides"):
            int4_gemm(torch.zeros(64, 2, dtype=torch.bfloat16).T, form)
        with pytest.raises(ShapeError, match=r"out is \[2, 8\], but \[2, 16\]"):
            int4_gemm(x, form, torch.empty(2, 8, dtype=torch.bfloat16))
        with pytest.raises(ShapeError, match=r"out \[2, 16\] is float32"):
            int4_gemm(x, form, torch.empty(2, 16))
        with pytest.raises(ShapeError, match="x is on meta"):
            int4_gemm(x.to("meta"), form)
    with pytest.raises(ShapeError, match="a stack of 2"):
        int4_gemm(x, random_weight(16, 64, 32, num_experts=2))


def test_a_gpu_reads_planar_words_only() -> None:
    weight = random_weight(16, 64, 32)
    there = Int4Weight(weight.packed.to("meta"), weight.scale_bits.to("meta"), 32)
    with pytest.raises(UsageError, match="planar_weight"):
        int4_gemm(torch.zeros(2, 64, dtype=torch.bfloat16, device="meta"), there)
