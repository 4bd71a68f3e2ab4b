"""Hessians: the checks, the CPU path against the reference, and which bits are the same."""

from __future__ import annotations

import pytest
import torch
from calibration_problems import make_offsets, make_symmetric, make_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memopt.errors import ShapeError, UsageError
from memopt.kernels.calibration import hessian_cpu
from memopt.kernels.calibration.hessian import accumulate_hessian
from memopt.kernels.calibration.hessian_reference import accumulate_hessian_reference


def test_the_reference_is_the_sum_of_outer_products() -> None:
    tokens, ends = make_tokens(7, 5), make_offsets(3, 0, 4)
    hessian = torch.zeros(3, 5, 5)
    accumulate_hessian_reference(hessian, tokens, ends)
    wide = tokens.double()
    for expert, rows in enumerate((wide[:3], wide[:0], wide[3:])):
        expected = sum((torch.outer(row, row) for row in rows), torch.zeros(5, 5, dtype=torch.float64))
        torch.testing.assert_close(hessian[expert].double(), expected, rtol=1e-6, atol=0.0)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=0, max_size=4), st.integers(1, 70), st.integers(0, 3), st.integers(1, 50))
def test_the_cpu_path_is_near_the_reference(counts: list[int], size: int, seed: int, chunk: int) -> None:
    tokens, ends = make_tokens(sum(counts), size, seed), make_offsets(*counts)
    start = make_symmetric(len(counts), size)
    found, expected, magnitude = start.clone(), start.clone(), start.abs()
    accumulate_hessian(found, tokens, ends, chunk_tokens=chunk)
    accumulate_hessian_reference(expected, tokens, ends, chunk_tokens=chunk)
    accumulate_hessian_reference(magnitude, tokens.abs(), ends)
    assert bool(((found - expected).abs() <= magnitude * 64 * 2.0**-24).all())
    assert torch.equal(found, found.mT)


@pytest.mark.parametrize("strip_rows", [16, 24, 512])
def test_strips_cover_every_element(strip_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hessian_cpu, "STRIP_ROWS", strip_rows)
    tokens, ends = make_tokens(30, 67), make_offsets(10, 20)
    found, expected = make_symmetric(2, 67), make_symmetric(2, 67)
    accumulate_hessian(found, tokens, ends)
    accumulate_hessian_reference(expected, tokens, ends)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(found, found.mT)


def test_one_matrix_without_experts() -> None:
    tokens = make_tokens(9, 6)
    alone, batched = torch.zeros(6, 6), torch.zeros(1, 6, 6)
    accumulate_hessian(alone, tokens)
    accumulate_hessian(batched, tokens, make_offsets(9))
    assert torch.equal(alone, batched[0])


def test_several_calls_in_whole_chunks_give_the_same_bits() -> None:
    tokens = make_tokens(100, 48)
    at_once, in_parts = torch.zeros(48, 48), torch.zeros(48, 48)
    accumulate_hessian(at_once, tokens, chunk_tokens=32)
    for first, end in ((0, 64), (64, 96), (96, 100)):
        accumulate_hessian(in_parts, tokens[first:end], chunk_tokens=32)
    assert torch.equal(at_once, in_parts)


def test_an_expert_has_the_same_bits_alone_and_among_others() -> None:
    tokens, ends = make_tokens(90, 48), make_offsets(20, 30, 40)
    together, alone = torch.zeros(3, 48, 48), torch.zeros(48, 48)
    accumulate_hessian(together, tokens, ends)
    accumulate_hessian(alone, tokens[20:50])
    assert torch.equal(together[1], alone)


def test_no_tokens_and_no_experts_change_nothing() -> None:
    start = make_symmetric(2, 8)
    hessian = start.clone()
    accumulate_hessian(hessian, make_tokens(0, 8), make_offsets(0, 0))
    assert torch.equal(hessian, start)
    accumulate_hessian(torch.zeros(0, 8, 8), make_tokens(0, 8), make_offsets())


def test_a_setting_for_fast_products_neither_counts_nor_changes() -> None:
    tokens = make_tokens(64, 256)
    plain, fast = torch.zeros(256, 256), torch.zeros(256, 256)
    accumulate_hessian(plain, tokens)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        accumulate_hessian(fast, tokens)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(plain, fast)


@pytest.mark.parametrize(
    ("hessian", "tokens", "ends", "words"),
    [
        (torch.zeros(2, 4, 4), torch.zeros(3, 4), make_offsets(1, 2), "tokens.*float32.*bfloat16 is needed"),
        (torch.zeros(2, 4, 5), make_tokens(3, 4), make_offsets(1, 2), r"hessian is \[2, 4, 5\], but \[2, 4, 4\]"),
        (torch.zeros(3, 4, 4), make_tokens(3, 4), make_offsets(1, 2), r"hessian is \[3, 4, 4\], but \[2, 4, 4\]"),
        (torch.zeros(4, 4, dtype=torch.float64), make_tokens(3, 4), None, "hessian.*float64, but float32"),
        (torch.zeros(2, 4, 4).mT, make_tokens(3, 4), make_offsets(1, 2), "strides"),
        (torch.zeros(2, 4, 4), make_tokens(4, 3).T, make_offsets(1, 2), "strides"),
        (torch.zeros(2, 4, 4), make_tokens(3, 4), make_offsets(1, 2).int(), "expert_offsets.*int32, but int64"),
        (torch.zeros(0, 4, 4), make_tokens(0, 4), make_offsets()[:0], "expert_offsets is empty"),
    ],
)
def test_tensors_that_do_not_fit(hessian: Tensor, tokens: Tensor, ends: Tensor | None, words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        accumulate_hessian(hessian, tokens, ends)


@pytest.mark.parametrize("ends", [[0, 1, 2], [1, 2, 3], [0, 4, 3], [0, -1, 3]])
def test_offsets_that_do_not_cover_the_tokens(ends: list[int]) -> None:
    with pytest.raises(UsageError, match="expert_offsets"):
        accumulate_hessian(torch.zeros(2, 4, 4), make_tokens(3, 4), torch.tensor(ends))


def test_an_empty_chunk() -> None:
    with pytest.raises(UsageError, match="chunk_tokens is 0"):
        accumulate_hessian(torch.zeros(4, 4), make_tokens(3, 4), chunk_tokens=0)
