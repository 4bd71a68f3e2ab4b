"""The page-tag check: exactly the requests whose pages were taken away are flagged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from page_tag_cases import TagCase, damaged_case, first_mismatches, one_past_the_pool, poisoned_result, sound_case

from memopt.errors import ShapeError
from memopt.kernels.kv_cache import page_tags_reference
from memopt.kernels.kv_cache.page_tags import verify_page_tags
from memopt.kernels.kv_cache.page_tags_reference import PageTagCheck


def _check(case: TagCase) -> tuple[list[int], list[int]]:
    out = poisoned_result(case.num_pages.shape[0])
    assert verify_page_tags(*case.arguments(), out) is out
    reference = page_tags_reference.verify_page_tags(*case.arguments(), poisoned_result(case.num_pages.shape[0]))
    assert torch.equal(out.flags, reference.flags)
    assert torch.equal(out.first_mismatch, reference.first_mismatch)
    return out.flags.tolist(), out.first_mismatch.tolist()


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 9), st.integers(0, 1 << 20), st.booleans())
def test_any_table(num_requests: int, max_pages: int, num_physical_pages: int, seed: int, is_damaged: bool) -> None:
    case = (damaged_case if is_damaged else sound_case)(num_requests, max_pages, num_physical_pages, seed)
    flags, first = _check(case)
    assert first == first_mismatches(case)
    assert flags == [int(position >= 0) for position in first]
    if not is_damaged:
        assert flags == [0] * num_requests


def _three_requests() -> TagCase:
    """Requests 0 and 1 share page 7; request 2 is padding."""
    tags = torch.arange(100, 110)
    table = torch.tensor([[7, 1, 2], [7, 3, 99], [0, 0, 0]], dtype=torch.int32)
    expected = torch.tensor([[107, 101, 102], [107, 103, 0], [0, 0, 0]])
    return TagCase(table, torch.tensor([3, 2, 0], dtype=torch.int32), tags, expected)


@pytest.mark.parametrize(
    ("damage", "first"),
    [
        (lambda case: None, [-1, -1, -1]),
        (lambda case: case.tags.__setitem__(1, 500), [1, -1, -1]),  # reallocated
        (lambda case: case.tags.__setitem__(7, 500), [0, 0, -1]),  # a shared page
        (lambda case: case.tags.__setitem__(9, 500), [-1, -1, -1]),  # nobody's page
        (lambda case: case.block_table[0].copy_(torch.tensor([7, 2, 1])), [1, -1, -1]),  # swapped entries
        (lambda case: case.expected[1, 1].add_(1 << 40), [-1, 1, -1]),  # a stale record, equal in its low half
        (lambda case: case.block_table[1, 1].fill_(10), [-1, 1, -1]),  # one past the pool
        (lambda case: case.block_table[1, 1].fill_(-1), [-1, 1, -1]),
        (lambda case: case.num_pages[1].fill_(4), [-1, 2, -1]),  # reads the stale entry, then past the row
        (lambda case: case.num_pages[2].fill_(-5), [-1, -1, 0]),
    ],
)
def test_faults_flag_exactly_their_requests(damage: Callable[[TagCase], Any], first: list[int]) -> None:
    case = _three_requests()
    damage(case)
    assert _check(case) == ([int(position >= 0) for position in first], first)


def test_a_page_that_was_never_given_out_is_a_mismatch() -> None:
    case = _three_requests()
    case.tags[1] = case.expected[0, 1] = 0
    assert _check(case) == ([1, 0, 0], [1, -1, -1])


def test_one_page_past_the_pool() -> None:
    assert _check(one_past_the_pool()) == ([0, 1], [-1, 1])


def test_tags_are_compared_in_all_64_bits() -> None:
    for bit in range(64):
        case = _three_requests()
        case.tags[3] ^= -(1 << 63) if bit == 63 else 1 << bit
        assert _check(case) == ([0, 1, 0], [-1, 1, -1])


def test_rows_of_larger_tables() -> None:
    case = damaged_case(5, 8, 6, 4)
    table, expected = torch.zeros(5, 11, dtype=torch.int32), torch.zeros(5, 9, dtype=torch.int64)
    table[:, 2:10], expected[:, :8] = case.block_table, case.expected
    strided = TagCase(table[:, 2:10], case.num_pages, case.tags, expected[:, :8])
    assert _check(strided) == _check(case)


def test_no_requests_and_no_columns() -> None:
    empty = sound_case(0, 4, 4, 1)
    assert verify_page_tags(*empty.arguments()).flags.shape == (0,)
    none = TagCase(
        torch.zeros(2, 0, dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.ones(1, dtype=torch.int64),
        torch.zeros(2, 0, dtype=torch.int64),
    )
    assert _check(none) == ([0, 1], [-1, 0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(3, 3, dtype=torch.int64)}, r"block_table \[any, any\] is int64"),
        ({0: torch.zeros(3, 3, dtype=torch.int32).T}, "rows must be contiguous"),
        ({1: torch.zeros(2, dtype=torch.int32)}, r"num_pages is \[2\], but \[3\]"),
        ({2: torch.zeros(10, dtype=torch.int32)}, "tags .any. is int32, but int64"),
        ({2: torch.zeros(0, dtype=torch.int64)}, "at least one page"),
        ({3: torch.zeros(3, 4, dtype=torch.int64)}, r"expected is \[3, 4\], but \[3, 3\]"),
        (
            {4: PageTagCheck(torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32))},
            r"out.flags is \[2\]",
        ),
        ({4: PageTagCheck(torch.zeros(3, dtype=torch.int32), torch.zeros(3))}, "out.first_mismatch .* is float32"),
    ],
)
def test_misfits_are_refused(change: dict[int, Any], message: str) -> None:
    arguments: list[Any] = [*_three_requests().arguments(), None]
    for at, value in change.items():
        arguments[at] = value
    with pytest.raises(ShapeError, match=message):
        verify_page_tags(*arguments)
