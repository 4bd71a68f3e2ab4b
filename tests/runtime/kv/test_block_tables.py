"""Block tables: rows of running requests on the device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.errors import CapacityError, UsageError
from memopt.kernels.layout import NO_TAG
from memopt.runtime.kv.block_tables import BlockTables
from memopt.runtime.kv.held_page import HeldPage
from memopt.runtime.kv.layer_kv import DUMMY_PAGE

MAX_REQUESTS, MAX_PAGES = 3, 5


def _tables() -> BlockTables:
    return BlockTables(MAX_REQUESTS, MAX_PAGES, "cpu")


def test_a_row_holds_pages_in_order_with_their_tags() -> None:
    tables = _tables()
    row = tables.add_row()
    tables.append(row, HeldPage(7, 107))
    tables.extend(row, [HeldPage(2, 1 << 62), HeldPage(9, 109)])
    tables.extend(row, [])
    assert tables.length(row) == 3
    assert tables.pages[row].tolist() == [7, 2, 9, DUMMY_PAGE, DUMMY_PAGE]
    assert tables.expected[row].tolist() == [107, 1 << 62, 109, NO_TAG, NO_TAG]
    assert (tables.pages.dtype, tables.expected.dtype, tables.num_pages.dtype) == (
        torch.int32,
        torch.int64,
        torch.int32,
    )


def test_a_row_that_is_given_up_reads_as_the_dummy_page() -> None:
    tables = _tables()
    row = tables.add_row()
    tables.extend(row, [HeldPage(page, page + 100) for page in range(1, 6)])
    tables.drop_row(row)
    assert not tables.pages.any()
    assert not tables.expected.any()
    for call in (lambda: tables.drop_row(row), lambda: tables.append(row, HeldPage(1, 1)), lambda: tables.length(row)):
        with pytest.raises(UsageError, match=f"row {row} of the block table is not in use"):
            call()


def test_full_tables_are_refused_and_unchanged() -> None:
    tables = _tables()
    rows = [tables.add_row() for _ in range(MAX_REQUESTS)]
    assert sorted(rows) == [0, 1, 2]
    with pytest.raises(CapacityError, match="all 3 rows"):
        tables.add_row()
    tables.extend(1, [HeldPage(page, page) for page in range(1, 5)])
    before = tables.pages.clone()
    with pytest.raises(CapacityError, match="row 1 of the block table holds 5 pages, 6 are needed"):
        tables.extend(1, [HeldPage(8, 8), HeldPage(9, 9)])
    assert torch.equal(tables.pages, before)
    assert tables.length(1) == 4


def test_a_step_says_what_it_reads() -> None:
    tables = _tables()
    assert tables.num_pages.tolist() == [0, 0, 0]
    tables.set_reads({2: 4, 0: 1})
    for _ in range(2):
        assert tables.num_pages.tolist() == [1, 0, 4]
        tables.set_reads({0: 1, 2: 4})
    tables.set_reads({})
    assert tables.num_pages.tolist() == [0, 0, 0]


def test_flagged_rows_read_as_the_dummy_page() -> None:
    tables = _tables()
    for row in range(MAX_REQUESTS):
        assert tables.add_row() == row
        tables.extend(row, [HeldPage(10 * row + n, 1) for n in range(1, 4)])
    rows = torch.tensor([2, 0, 2, 1])
    assert tables.gather(rows, 2).tolist() == [[21, 22], [1, 2], [21, 22], [11, 12]]
    flags = torch.tensor([0, 1, 1], dtype=torch.int32)
    assert tables.gather(rows, 2, flags).tolist() == [[0, 0], [1, 2], [0, 0], [0, 0]]
    assert tables.pages[2, :3].tolist() == [21, 22, 23]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=30))
def test_any_order_of_writes(actions: list[tuple[int, int]]) -> None:
    """Against a dict of lists; rows are reused as requests come and go."""
    tables = _tables()
    rows: dict[int, list[HeldPage]] = {}
    next_page = 1
    for kind, count in actions:
        if kind == 0 and len(rows) < MAX_REQUESTS:
            rows[tables.add_row()] = []
        elif kind == 1 and rows:
            row = min(rows, key=lambda row: len(rows[row]))
            held = [HeldPage(next_page + n, next_page + n + 1000) for n in range(count)]
            if len(rows[row]) + count <= MAX_PAGES:
                tables.extend(row, held)
                rows[row] += held
                next_page += count
        elif kind == 2 and rows:
            row = max(rows)
            tables.drop_row(row)
            del rows[row]
    for row in range(MAX_REQUESTS):
        held = rows.get(row, [])
        padding = MAX_PAGES - len(held)
        assert tables.pages[row].tolist() == [item.page for item in held] + [DUMMY_PAGE] * padding
        assert tables.expected[row].tolist() == [item.tag for item in held] + [NO_TAG] * padding
        if row in rows:
            assert tables.length(row) == len(held)
