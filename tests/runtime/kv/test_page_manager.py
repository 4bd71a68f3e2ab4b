"""Pages: every one is in exactly one state, is freed once, and waits for the steps that may read it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from memopt.errors import PageError, UsageError
from memopt.kernels.layout import NO_TAG
from memopt.runtime.integrity.tagged_tracker import TaggedTracker
from memopt.runtime.integrity.tracker import NoopTracker
from memopt.runtime.kv.held_page import HeldPage
from memopt.runtime.kv.layer_kv import DUMMY_PAGE
from memopt.runtime.kv.page_manager import PageManager

NUM_PAGES = 9


def _manager(num_pages: int = NUM_PAGES) -> PageManager:
    return PageManager(num_pages, TaggedTracker(num_pages, "cpu"))


def _allocate(manager: PageManager, count: int) -> tuple[HeldPage, ...]:
    pages = manager.allocate(count)
    assert pages is not None
    return pages


def _figures(manager: PageManager) -> tuple[int, int, int, int]:
    manager.check()
    return manager.num_free, manager.num_used, manager.num_fenced, manager.num_quarantined


def test_all_or_none() -> None:
    manager = _manager(5)
    first = _allocate(manager, 3)
    assert len({held.page for held in first}) == 3
    assert DUMMY_PAGE not in {held.page for held in first}
    assert manager.allocate(2) is None
    assert _figures(manager) == (1, 3, 0, 0)
    assert manager.allocate(0) == ()
    _allocate(manager, 1)
    assert manager.allocate(1) is None
    assert (manager.num_pages, manager.peak_used) == (4, 4)


def test_pages_wait_for_the_steps_that_may_read_them() -> None:
    manager = _manager(4)
    one, two, three = _allocate(manager, 3)
    manager.release([one], step=7)
    manager.release([two], step=9)
    assert _figures(manager) == (0, 1, 2, 0)
    manager.retire(6)
    assert manager.num_free == 0
    manager.retire(8)
    assert _figures(manager) == (1, 1, 1, 0)
    # The last step finished before the release: nothing can read the page any more.
    manager.retire(9)
    manager.release([three], step=9)
    assert _figures(manager) == (3, 0, 0, 0)
    # The page that was freed last comes first, with another tag.
    again = _allocate(manager, 1)[0]
    assert again.page == three.page
    assert again.tag not in (one.tag, two.tag, three.tag)


def test_a_fence_that_is_told_late_waits_as_long_as_the_one_before() -> None:
    manager = _manager(4)
    one, two, _ = _allocate(manager, 3)
    manager.release([one], step=9)
    manager.release([two], step=7)
    manager.retire(8)
    assert _figures(manager) == (0, 1, 2, 0)
    manager.retire(9)
    assert manager.num_free == 2


def test_a_shared_page_is_free_when_its_last_holder_gave_it_up() -> None:
    manager = _manager()
    (held,) = _allocate(manager, 1)
    manager.share(held)
    assert manager.num_holders(held.page) == 2
    manager.release([held], step=0)
    assert _figures(manager) == (NUM_PAGES - 2, 1, 0, 0)
    manager.release([held], step=0)
    assert _figures(manager) == (NUM_PAGES - 2, 0, 1, 0)


def test_a_double_free_is_refused_with_page_and_counts() -> None:
    manager = _manager()
    (held,) = _allocate(manager, 1)
    manager.release([held], step=3)
    for _ in range(2):
        with pytest.raises(PageError, match=rf"page {held.page} cannot be freed: it is fenced, has 0 holders"):
            manager.release([held], step=3)
        with pytest.raises(PageError, match="cannot be shared: it is fenced"):
            manager.share(held)
        manager.retire(2)
    assert _figures(manager) == (NUM_PAGES - 2, 0, 1, 0)


def test_a_page_that_is_somebody_elses_now_is_not_freed() -> None:
    """Without tags the manager would take the new owner's page: two owners of one page, the classic silent fault."""
    manager = _manager()
    (old,) = _allocate(manager, 1)
    manager.release([old], step=0)
    manager.retire(0)
    (new,) = _allocate(manager, 1)
    assert new.page == old.page
    with pytest.raises(PageError, match=f"has 1 holders and tag {new.tag:#x}, and the caller .* tag {old.tag:#x}"):
        manager.release([old], step=1)
    assert manager.release_own([old, new], step=1) == (0,)
    assert _figures(manager) == (NUM_PAGES - 2, 0, 1, 0)


def test_what_is_listed_as_free_twice_gets_no_two_owners() -> None:
    manager = _manager()
    manager._free[-2] = manager._free[-1]
    with pytest.raises(PageError, match=r"one of the pages \[1, 1\] is listed as free twice"):
        manager.allocate(2)


def test_who_lost_a_page_gives_back_the_others() -> None:
    manager = _manager()
    one, two, three = _allocate(manager, 3)
    manager.release([two], step=1)
    assert manager.release_own([one, two, three], step=1) == (1,)
    assert manager.release_own([one, two, three], step=1) == (0, 1, 2)
    assert _figures(manager) == (NUM_PAGES - 4, 0, 3, 0)
    outside = [HeldPage(page, NO_TAG) for page in (DUMMY_PAGE, -1, NUM_PAGES)]
    assert manager.release_own(outside, step=1) == (0, 1, 2)


@pytest.mark.parametrize("page", [DUMMY_PAGE, -1, NUM_PAGES])
def test_what_is_no_page_is_nobodys(page: int) -> None:
    manager = _manager()
    with pytest.raises(PageError, match=f"page {page} cannot be freed: pages that are given out are 1 to 8"):
        manager.release([HeldPage(page, NO_TAG)], step=0)
    assert not manager.quarantine(page)
    assert _figures(manager) == (NUM_PAGES - 1, 0, 0, 0)


@pytest.mark.parametrize("state", ["free", "held", "shared", "fenced"])
def test_a_quarantined_page_never_comes_back(state: str) -> None:
    manager = _manager()
    (held,) = _allocate(manager, 1)
    holders = [held]
    if state == "shared":
        manager.share(held)
        holders.append(held)
    if state in ("free", "fenced"):
        manager.release(holders, step=4)
        holders = []
    if state == "free":
        manager.retire(4)
    assert manager.quarantine(held.page)
    assert manager.quarantine(held.page)
    assert manager.num_quarantined == 1
    manager.check(holders)
    for holder in holders:
        with pytest.raises(PageError, match="is quarantined and cannot be shared"):
            manager.share(holder)
        manager.release([holder], step=5)
    manager.retire(5)
    assert _figures(manager) == (NUM_PAGES - 2, 0, 0, 1)
    assert held.page not in {other.page for other in _allocate(manager, NUM_PAGES - 2)}
    assert manager.allocate(1) is None


def test_check_compares_what_holders_believe() -> None:
    manager = _manager()
    one, two = _allocate(manager, 2)
    manager.check([one, two])
    with pytest.raises(PageError, match=f"page {two.page} has 1 holders on record, but 0 hold it"):
        manager.check([one])
    with pytest.raises(PageError, match=f"page {one.page} has 1 holders on record, but 2 hold it"):
        manager.check([one, one, two])
    with pytest.raises(PageError, match="cannot be checked"):
        manager.check([one, HeldPage(two.page, two.tag + 1)])


@pytest.mark.parametrize("damage", ["count", "free twice", "held and free", "lost"])
def test_check_finds_damage(damage: str) -> None:
    manager = _manager()
    (held,) = _allocate(manager, 1)
    if damage == "count":
        manager._num_holders[held.page] = 0
    elif damage == "free twice":
        manager._free[0] = manager._free[1]
    elif damage == "held and free":
        manager._free[0] = held.page
    else:
        manager._free.pop()
    with pytest.raises(PageError):
        manager.check()


def test_misuse_is_refused() -> None:
    with pytest.raises(UsageError, match="1 pages: one is the dummy page"):
        PageManager(1, NoopTracker())
    with pytest.raises(UsageError, match="-1 pages"):
        _manager().allocate(-1)


def test_without_tags_counts_are_kept_all_the_same() -> None:
    manager = PageManager(4, NoopTracker())
    (held,) = _allocate(manager, 1)
    assert held.tag == NO_TAG
    manager.release([held], step=0)
    with pytest.raises(PageError, match="has 0 holders"):
        manager.release([held], step=0)


class PageLives(RuleBasedStateMachine):
    """Holders that take, share and give up pages at random, against a model that remembers all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = _manager()
        self.holders: list[HeldPage] = []
        self.tags_seen: set[int] = set()
        self.fenced: dict[int, int] = {}
        self.quarantined: set[int] = set()
        self.step = 0

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        num_free = self.manager.num_free
        pages = self.manager.allocate(count)
        if pages is None:
            assert count > num_free
            return
        for held in pages:
            assert held.page not in {other.page for other in self.holders} | set(self.fenced) | self.quarantined
            assert held.tag not in self.tags_seen
            self.tags_seen.add(held.tag)
        self.holders += pages

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        sound = [held for held in self.holders if held.page not in self.quarantined]
        if sound:
            held = data.draw(st.sampled_from(sound))
            self.manager.share(held)
            self.holders.append(held)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.holders:
            held = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
            self.manager.release([held], self.step)
            if held not in self.holders and held.page not in self.quarantined:
                self.fenced[held.page] = self.step

    @rule(num_steps=st.integers(0, 3))
    def run_steps(self, num_steps: int) -> None:
        self.step += num_steps
        self.manager.retire(self.step - 1)
        self.fenced = {page: step for page, step in self.fenced.items() if step >= self.step}

    @rule(page=st.integers(-1, NUM_PAGES))
    def quarantine(self, page: int) -> None:
        if self.manager.quarantine(page):
            self.quarantined.add(page)
            self.fenced.pop(page, None)

    @invariant()
    def all_pages_are_accounted_for(self) -> None:
        manager = self.manager
        manager.check(self.holders)
        used = {held.page for held in self.holders} - self.quarantined
        assert manager.num_used == len(used)
        assert (manager.num_fenced, manager.num_quarantined) == (len(self.fenced), len(self.quarantined))
        assert manager.num_free + manager.num_used + manager.num_fenced + manager.num_quarantined == NUM_PAGES - 1
        for held, count in Counter(self.holders).items():
            assert manager.num_holders(held.page) == count


TestPageLives = PageLives.TestCase
TestPageLives.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
