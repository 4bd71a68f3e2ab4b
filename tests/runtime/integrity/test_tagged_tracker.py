"""The tracker with tags: no tag comes twice, and a check sees the tables as they are at the time of the call."""

from __future__ import annotations

import re

import pytest
import torch

from memopt.errors import PageError, UsageError
from memopt.kernels.layout import NO_TAG, TAG_COUNTER_BITS, TAG_SERIES_BITS
from memopt.runtime.integrity import tagged_tracker
from memopt.runtime.integrity.choose_tracker import choose_tracker
from memopt.runtime.integrity.tagged_tracker import TaggedTracker
from memopt.runtime.integrity.tracker import NoopTracker
from memopt.runtime.kv.block_tables import BlockTables
from memopt.runtime.kv.held_page import HeldPage


def test_no_two_pages_of_a_process_have_one_tag() -> None:
    trackers = [TaggedTracker(4, "cpu") for _ in range(3)]
    tags = [tag for tracker in trackers for _ in range(5) for tag in tracker.on_allocate([1, 3])]
    assert len(set(tags)) == len(tags) == 30
    assert NO_TAG not in tags
    assert all(0 < tag < 1 << 63 for tag in tags)


def test_a_tag_is_in_force_when_it_is_returned() -> None:
    tracker = TaggedTracker(4, "cpu")
    assert tracker.tags.tolist() == [NO_TAG] * 4
    first, second = tracker.on_allocate([3, 1])
    assert tracker.tags.tolist() == [NO_TAG, second, NO_TAG, first]
    assert (tracker.tag_of(3), tracker.tag_of(0)) == (first, NO_TAG)
    (third,) = tracker.on_allocate([3])
    assert tracker.tag_of(3) == third != first
    assert list(tracker.on_allocate([])) == []
    assert [tracker.tag_of(page) for page in (-1, 4)] == [NO_TAG, NO_TAG]


def test_tags_that_would_wrap_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = TaggedTracker(4, "cpu")
    tracker._last_tag = tracker._largest_tag - 2
    before = tracker.tags.clone()
    with pytest.raises(PageError, match=f"used up after {(1 << TAG_COUNTER_BITS) - 1} allocations"):
        tracker.on_allocate([1, 2, 3])
    assert torch.equal(tracker.tags, before)
    assert list(tracker.on_allocate([1, 2])) == [tracker._largest_tag - 1, tracker._largest_tag]
    with pytest.raises(PageError, match="used up"):
        tracker.on_allocate([1])
    monkeypatch.setattr(tagged_tracker, "_series", iter([(1 << TAG_SERIES_BITS) - 1, 1 << TAG_SERIES_BITS]))
    assert TaggedTracker(2, "cpu").on_allocate([1])[0] < 1 << 63
    with pytest.raises(PageError, match="trackers of page tags in one process"):
        TaggedTracker(2, "cpu")


def _tables(tracker: TaggedTracker) -> BlockTables:
    tables = BlockTables(3, 4, "cpu")
    for pages in ([1, 2], [3]):
        row = tables.add_row()
        tables.extend(row, list(map(HeldPage, pages, tracker.on_allocate(pages))))
    tables.set_reads({0: 2, 1: 1})
    return tables


def _flags(tracker: TaggedTracker, tables: BlockTables) -> tuple[list[int], list[int]]:
    check = tracker.check(tables.pages, tables.num_pages, tables.expected)
    return check.flags.tolist(), check.first_mismatch.tolist()


def test_a_repeated_check_sees_what_changed() -> None:
    tracker = TaggedTracker(6, "cpu")
    tables = _tables(tracker)
    assert not tracker.is_known_clean
    for _ in range(2):
        assert _flags(tracker, tables) == ([0, 0, 0], [-1, -1, -1])
        assert tracker.is_known_clean
    tracker.on_allocate([2])
    assert _flags(tracker, tables) == ([1, 0, 0], [1, -1, -1])
    assert not tracker.is_known_clean
    tables.pages[1, 0] = 5
    assert _flags(tracker, tables) == ([1, 1, 0], [1, 0, -1])
    tables.drop_row(0)
    assert _flags(tracker, tables) == ([1, 1, 0], [0, 0, -1])
    tables.set_reads({1: 1})
    assert _flags(tracker, tables) == ([0, 1, 0], [-1, 0, -1])


def test_other_tables_are_looked_at_anew() -> None:
    tracker = TaggedTracker(6, "cpu")
    tables = _tables(tracker)
    _flags(tracker, tables)
    tracker.on_allocate([3])
    gathered = [tensor[[1, 0]].clone() for tensor in (tables.pages, tables.num_pages, tables.expected)]
    assert tracker.check(*gathered).flags.tolist() == [1, 0]
    narrow = tracker.check(gathered[0][:, :1], gathered[1], gathered[2][:, :1])
    assert narrow.flags.tolist() == [1, 1]
    assert _flags(tracker, tables) == ([0, 1, 0], [-1, 0, -1])
    with pytest.raises(Exception, match=re.escape("expected is [2, 4], but [3, 4]")):
        tracker.check(tables.pages, tables.num_pages, gathered[2])


def test_trackers_by_name() -> None:
    assert isinstance(choose_tracker("noop", 4, "cpu"), NoopTracker)
    tagged = choose_tracker("tagged", 4, "cpu")
    assert isinstance(tagged, TaggedTracker)
    assert tagged.tags.shape == (4,)
    with pytest.raises(UsageError, match="integrity is 'on'"):
        choose_tracker("on", 4, "cpu")


def test_the_tracker_without_tags_does_nothing() -> None:
    tracker = NoopTracker()
    assert not tracker.is_checking
    assert list(tracker.on_allocate([1, 2])) == [NO_TAG, NO_TAG]
    assert tracker.tag_of(1) == NO_TAG
    tables = BlockTables(1, 1, "cpu")
    assert tracker.check(tables.pages, tables.num_pages, tables.expected) is None
