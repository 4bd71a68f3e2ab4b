"""The Triton page-tag check against a loop over every entry."""

from __future__ import annotations

import pytest
import torch
from guarded_memory import guarded
from page_tag_cases import TagCase, damaged_case, first_mismatches, one_past_the_pool, poisoned_result, sound_case

from memopt.kernels.kv_cache.page_tags_triton import MAX_BLOCK_PAGES, verify_page_tags


def _check(case: TagCase) -> tuple[list[int], list[int]]:
    out = poisoned_result(case.num_pages.shape[0])
    arguments = [guarded(tensor) if tensor.is_contiguous() else tensor for tensor in case.arguments()]
    assert verify_page_tags(*arguments, out) is out
    return out.flags.tolist(), out.first_mismatch.tolist()


@pytest.mark.parametrize("seed", range(40))
def test_any_table(seed: int) -> None:
    case = damaged_case(6, 1 + seed % 7, 1 + seed % 5, seed)
    first = first_mismatches(case)
    assert _check(case) == ([int(position >= 0) for position in first], first)


def test_a_sound_table_flags_nobody() -> None:
    assert _check(sound_case(16, 300, 1000, 1)) == ([0] * 16, [-1] * 16)


def test_one_page_past_the_pool() -> None:
    assert _check(one_past_the_pool()) == ([0, 1], [-1, 1])


def test_rows_of_larger_tables() -> None:
    case = damaged_case(5, 8, 6, 4)
    table, expected = torch.zeros(5, 11, dtype=torch.int32), torch.zeros(5, 9, dtype=torch.int64)
    table[:, 2:10], expected[:, :8] = case.block_table, case.expected
    strided = TagCase(table[:, 2:10], case.num_pages, case.tags, expected[:, :8])
    assert _check(strided) == _check(case)


def test_more_pages_than_one_iteration_compares() -> None:
    # The context of 1,048,576 tokens of GLM-5.2 is 16,384 pages.
    max_pages = 16384
    case = sound_case(3, max_pages, 500, 3)
    case.num_pages.fill_(max_pages)
    case.block_table.copy_(torch.randint(500, (3, max_pages)))
    case.expected.copy_(case.tags[case.block_table.long()])
    assert _check(case) == ([0] * 3, [-1] * 3)
    for position in (max_pages - 1, MAX_BLOCK_PAGES, MAX_BLOCK_PAGES - 1):
        case.expected[1, position] += 1
        assert _check(case) == ([0, 1, 0], [-1, position, -1])
