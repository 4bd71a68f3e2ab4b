"""Reports of pages that were not their request's: what they say, and where there is nothing to say."""

from __future__ import annotations

import json
import logging

import pytest

from memopt.kernels.kv_cache.page_tags_reference import NO_MISMATCH
from memopt.kernels.layout import NO_TAG
from memopt.runtime.integrity.mismatch import PREFIX_INDEX, PageMismatch, describe_mismatch, log_mismatch
from memopt.runtime.integrity.tagged_tracker import TaggedTracker
from memopt.runtime.kv.block_tables import BlockTables
from memopt.runtime.kv.held_page import HeldPage


def test_a_report_names_the_page_that_the_table_led_to() -> None:
    tracker, tables = TaggedTracker(8, "cpu"), BlockTables(2, 4, "cpu")
    tables.add_row()
    row = tables.add_row()
    tags = tracker.on_allocate([3, 5])
    tables.extend(row, list(map(HeldPage, [3, 5], tags)))
    (found,) = tracker.on_allocate([6])
    tables.pages[row, 1] = 6
    assert describe_mismatch(tables, tracker, row, 1, "9", 4) == PageMismatch("9", 1, 6, tags[1], found, 4)
    tables.pages[row, 1] = 8
    assert describe_mismatch(tables, tracker, row, 1, "9", 4) == PageMismatch("9", 1, 8, tags[1], NO_TAG, 4)


@pytest.mark.parametrize("page_index", [NO_MISMATCH, 4])
def test_a_report_without_a_page(page_index: int) -> None:
    """Another rank found it, or the row's count was past its end."""
    report = describe_mismatch(BlockTables(2, 4, "cpu"), TaggedTracker(8, "cpu"), 1, page_index, "9", 4)
    assert report == PageMismatch("9", page_index, -1, NO_TAG, NO_TAG, 4)


def test_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="memopt.integrity")
    log_mismatch(PageMismatch("9", 1, 6, (1 << 63) - 1, 0, 4))
    log_mismatch(PageMismatch(PREFIX_INDEX, -1, 6, 7, 7, 4, "page_lost"))
    assert [record.getMessage() for record in caplog.records] == [
        '{"event": "page_mismatch", "request_id": "9", "step": 4, "page_index": 1, "page": 6,'
        ' "expected": "0x7fffffffffffffff", "found": "0x0000000000000000"}',
        '{"event": "page_lost", "request_id": "prefix index", "step": 4, "page_index": -1, "page": 6,'
        ' "expected": "0x0000000000000007", "found": "0x0000000000000007"}',
    ]
    assert json.loads(caplog.records[0].getMessage())["expected"] == hex((1 << 63) - 1)
