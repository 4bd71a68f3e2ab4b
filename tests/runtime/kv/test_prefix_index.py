"""The prefix index: equal tokens of one tenant under one release share pages, and nothing else does."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from memopt.errors import UsageError
from memopt.kernels.layout import PAGE_TOKENS
from memopt.runtime.integrity.tagged_tracker import TaggedTracker
from memopt.runtime.kv.held_page import HeldPage
from memopt.runtime.kv.page_manager import PageManager
from memopt.runtime.kv.prefix_index import PrefixIndex, prefix_namespace

NAMESPACE = prefix_namespace("00" * 32, "bf16")


def _manager(num_pages: int = 40) -> PageManager:
    return PageManager(num_pages, TaggedTracker(num_pages, "cpu"))


def _prompt(*pages: int, rest: int = 0) -> list[int]:
    """A prompt whose full pages hold one number each, and `rest` tokens behind them."""
    return [page * 1000 + position for page in pages for position in range(PAGE_TOKENS)] + [7] * rest


def _insert(index: PrefixIndex, manager: PageManager, tokens: list[int], salt: bytes = b"") -> list[HeldPage]:
    """As a request does: takes pages, fills them, inserts, and ends."""
    pages = manager.allocate(-(-len(tokens) // PAGE_TOKENS))
    assert pages is not None
    index.insert(tokens, pages, salt)
    manager.release(pages, step=0)
    manager.retire(0)
    return list(pages)


def _match(index: PrefixIndex, manager: PageManager, tokens: list[int], salt: bytes = b"") -> list[int]:
    """Page ids of a hit, given back at once."""
    pages = index.match(tokens, salt)
    manager.release(pages, step=0)
    return [held.page for held in pages]


def test_the_longest_known_beginning_is_shared() -> None:
    manager = _manager()
    index = PrefixIndex(NAMESPACE, manager)
    first = _insert(index, manager, _prompt(1, 2, 3, rest=5))
    assert index.num_pages == 3
    assert manager.num_used == 3
    hit = index.match(_prompt(1, 2, 9, rest=1))
    assert hit == first[:2]
    assert [manager.num_holders(held.page) for held in first[:3]] == [2, 2, 1]
    manager.check([*index.held_pages, *hit])
    assert (index.counts.num_lookups, index.counts.num_looked_up_tokens, index.counts.num_hit_tokens) == (1, 193, 128)


def test_one_token_is_always_left_to_compute() -> None:
    manager = _manager()
    index = PrefixIndex(NAMESPACE, manager)
    pages = [held.page for held in _insert(index, manager, _prompt(1, 2))]
    assert _match(index, manager, _prompt(1, 2)) == pages[:1]
    assert _match(index, manager, _prompt(1, 2, rest=1)) == pages
    assert _match(index, manager, _prompt(1)) == []
    assert _match(index, manager, []) == []


def test_a_page_belongs_to_what_stands_before_it() -> None:
    manager = _manager()
    index = PrefixIndex(NAMESPACE, manager)
    one = _insert(index, manager, _prompt(1, 2))
    other = _insert(index, manager, _prompt(3, 2))
    assert index.num_pages == 4
    assert _match(index, manager, _prompt(3, 2, rest=1)) == [held.page for held in other]
    assert _match(index, manager, _prompt(1, 2, rest=1)) == [held.page for held in one]
    assert _match(index, manager, _prompt(2, rest=1)) == []


def test_tenants_and_releases_do_not_share() -> None:
    manager = _manager()
    index = PrefixIndex(NAMESPACE, manager)
    pages = [held.page for held in _insert(index, manager, _prompt(1), b"alice")]
    assert _match(index, manager, _prompt(1, rest=1), b"alice") == pages
    for salt in (b"", b"bob", b"alic", b"alice "):
        assert _match(index, manager, _prompt(1, rest=1), salt) == []
    namespaces = {
        prefix_namespace("00" * 32, "bf16"),
        prefix_namespace("00" * 32, "bf16", b"scales"),
        prefix_namespace("00" * 32, "fp8_e4m3"),
        prefix_namespace("01" * 32, "bf16"),
        prefix_namespace("00" * 32 + "b", "f16"),
    }
    assert len(namespaces) == 5
    digests = {PrefixIndex(name, manager)._digest(b"", None, b"tokens") for name in namespaces}
    assert len(digests) == 5


def test_a_collision_of_digests_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a digest that is equal for everything, only the comparison of the tokens is left."""
    manager = _manager()
    monkeypatch.setattr(PrefixIndex, "_digest", lambda *_: b"equal")
    index = PrefixIndex(NAMESPACE, manager)
    pages = [held.page for held in _insert(index, manager, _prompt(1, 2), b"alice")]
    assert index.num_pages == 1
    assert _match(index, manager, _prompt(1, rest=1), b"alice") == pages[:1]
    assert _match(index, manager, _prompt(1, 1, rest=1), b"alice") == pages[:1]
    assert _match(index, manager, _prompt(2, rest=1), b"alice") == []
    assert _match(index, manager, _prompt(1, rest=1), b"bob") == []
    _insert(index, manager, _prompt(3))
    assert _match(index, manager, _prompt(3, rest=1)) == []
    assert _match(index, manager, _prompt(1, rest=1), b"alice") == pages[:1]


def test_a_second_copy_is_not_kept_and_nobodys_pages_change() -> None:
    """Two equal prompts that ran side by side: the index keeps one page, the other stays its request's own."""
    manager = _manager()
    index = PrefixIndex(NAMESPACE, manager)
    tokens = _prompt(1, 2)
    mine, yours = manager.allocate(2), manager.allocate(2)
    assert mine is not None
    assert yours is not None
    assert index.insert(tokens, mine) == 2
    assert index.insert(tokens, yours) == 0
    assert index.insert(_prompt(1, 2, 3), [*yours, *(manager.allocate(1) or ())]) == 1
    assert [manager.num_holders(held.page) for held in (*mine, *yours)] == [2, 2, 1, 1]
    assert _match(index, manager, _prompt(1, 2, rest=1)) == [held.page for held in mine]


def test_the_least_lately_used_goes_first_and_ends_before_beginnings() -> None:
    manager = _manager()
    index = PrefixIndex(NAMESPACE, manager)
    old = _insert(index, manager, _prompt(1, 2))
    new = _insert(index, manager, _prompt(3, 4))
    assert _match(index, manager, _prompt(1, 2, rest=1))
    manager.retire(0)
    for expected in (new[1], new[0], old[1], old[0]):
        assert index.evict(1, step=0) == 1
        assert expected not in list(index.held_pages)
    assert index.evict(1, step=0) == 0
    assert index.counts.num_evicted_pages == 4
    assert manager.num_used == 0


def test_one_call_gives_up_all_that_nobody_else_holds() -> None:
    """Also when one that ended early has put a page in use behind the page before it."""
    manager = _manager()
    index = PrefixIndex(NAMESPACE, manager)
    _insert(index, manager, _prompt(1, 2))
    held = index.match(_prompt(1, 2, rest=1))
    _insert(index, manager, _prompt(3))
    _match(index, manager, _prompt(1, rest=1))
    assert index.evict(1, step=0) == 1
    manager.release(held, step=0)
    assert index.num_pages == 2
    assert index.evict(2, step=0) == 2
    assert manager.num_used == 0


def test_pages_of_running_requests_stay() -> None:
    manager = _manager()
    index = PrefixIndex(NAMESPACE, manager)
    _insert(index, manager, _prompt(1, 2, 3))
    held = index.match(_prompt(1, 2, rest=1))
    assert index.evict(10, step=1) == 1
    assert set(index.held_pages) == set(held)
    manager.release(held, step=1)
    assert index.evict(10, step=1) == 2
    assert manager.num_fenced == 3
    manager.retire(1)
    assert manager.num_free == manager.num_pages


def test_what_a_page_in_use_follows_stays_though_nobody_uses_it() -> None:
    """A request that computed its own copy of a known beginning holds only the page behind it."""
    manager = _manager()
    index = PrefixIndex(NAMESPACE, manager)
    known = _insert(index, manager, _prompt(1, 2))
    mine = manager.allocate(3)
    assert mine is not None
    assert index.insert(_prompt(1, 2, 3), mine) == 1
    assert index.evict(10, step=0) == 0
    assert _match(index, manager, _prompt(1, 2, 3, rest=1)) == [known[0].page, known[1].page, mine[2].page]
    manager.release(mine, step=0)
    assert index.evict(10, step=0) == 3


def test_forgotten_pages_take_their_followers_along() -> None:
    manager = _manager()
    index = PrefixIndex(NAMESPACE, manager)
    pages = _insert(index, manager, _prompt(1, 2, 3))
    branch = _insert(index, manager, _prompt(1, 4))
    held = index.match(_prompt(1, 2, 3, rest=1))
    assert index.forget([pages[1].page, 39], step=1) == 2
    assert _match(index, manager, _prompt(1, 2, 3, rest=1)) == [pages[0].page]
    assert _match(index, manager, _prompt(1, 4, rest=1)) == [pages[0].page, branch[1].page]
    manager.check([*index.held_pages, *held])
    index.clear(step=1)
    assert index.num_pages == 0
    manager.check(held)


def test_a_quarantined_page_leaves_by_forget() -> None:
    manager = _manager()
    index = PrefixIndex(NAMESPACE, manager)
    (held,) = _insert(index, manager, _prompt(1))
    manager.quarantine(held.page)
    index.forget([held.page], step=0)
    assert _match(index, manager, _prompt(1, rest=1)) == []
    manager.check()
    assert manager.num_quarantined == 1


def test_giving_up_a_quarantined_page_frees_nothing_and_does_not_count() -> None:
    manager = _manager()
    index = PrefixIndex(NAMESPACE, manager)
    (bad,) = _insert(index, manager, _prompt(1))
    _insert(index, manager, _prompt(2))
    manager.quarantine(bad.page)
    num_free = manager.num_free
    assert index.evict(1, step=0) == 1
    assert (manager.num_free, index.num_pages, index.counts.num_evicted_pages) == (num_free + 1, 0, 1)
    manager.check()


@pytest.mark.parametrize("fault", ["quarantined", "freed", "somebody else's"])
def test_a_page_that_is_not_sound_does_not_enter(fault: str) -> None:
    """Nor what follows it; its request goes on."""
    manager = _manager()
    index = PrefixIndex(NAMESPACE, manager)
    pages = manager.allocate(3) or ()
    if fault == "quarantined":
        manager.quarantine(pages[1].page)
    else:
        manager.release([pages[1]], step=0)
        manager.retire(0)
    if fault == "somebody else's":
        (owner,) = manager.allocate(1) or ()
        assert owner.page == pages[1].page
    assert index.insert(_prompt(1, 2, 3), pages) == 1
    assert list(index.held_pages) == [pages[0]]


@pytest.mark.parametrize("is_taken", [False, True])
@pytest.mark.parametrize("found_by", ["match", "evict"])
def test_an_entry_whose_page_was_freed_behind_its_back(found_by: str, is_taken: bool) -> None:
    """Somebody gave the index's page back: no hit, no second free, and the entry leaves with what follows it."""
    manager = _manager()
    index = PrefixIndex(NAMESPACE, manager)
    pages = _insert(index, manager, _prompt(1, 2, 3))
    manager.release([pages[1]], step=0)
    owners = list(manager.allocate(1) or ()) if is_taken else []
    assert [held.page for held in owners] == ([pages[1].page] if is_taken else [])
    if found_by == "match":
        assert _match(index, manager, _prompt(1, 2, 3, rest=1)) == [pages[0].page]
        assert index.num_pages == 3
    else:
        # The last and the first are given back; the one between is not the index's to give.
        assert index.evict(3, step=0) == 2
    assert index.take_lost(step=0) == (pages[1],)
    assert index.take_lost(step=0) == ()
    assert list(index.held_pages) == (pages[:1] if found_by == "match" else [])
    assert index.counts.num_lost_pages == 1
    manager.check([*index.held_pages, *owners])


def test_misuse_is_refused() -> None:
    manager = _manager()
    index = PrefixIndex(NAMESPACE, manager)
    with pytest.raises(UsageError, match="130 tokens fill 2 pages of 64, 1 are given"):
        index.insert([1] * 130, manager.allocate(1) or ())
    for namespace in (b"", b"x" * 65):
        with pytest.raises(UsageError, match="a namespace of"):
            PrefixIndex(namespace, manager)


class PrefixLives(RuleBasedStateMachine):
    """Requests over a small alphabet of pages come, share, end and are forgotten; contents are tracked by page id."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = _manager(12)
        self.index = PrefixIndex(NAMESPACE, self.manager)
        self.running: list[tuple[list[HeldPage], tuple[int, ...], bytes]] = []
        # What each page's keys and values were computed from: everything up to its end, and whose it is.
        self.contents: dict[HeldPage, tuple[tuple[int, ...], bytes]] = {}
        self.step = count()

    @rule(pages=st.lists(st.integers(1, 2), min_size=1, max_size=4).map(tuple), salt=st.sampled_from([b"", b"t"]))
    def start(self, pages: tuple[int, ...], salt: bytes) -> None:
        held = self.index.match(_prompt(*pages, rest=1), salt)
        for at, item in enumerate(held):
            assert self.contents[item] == (pages[: at + 1], salt)
        num_new = len(pages) + 1 - len(held)
        new = self.manager.allocate(num_new)
        if new is None:
            self.index.evict(num_new - self.manager.num_free, next(self.step))
            self.manager.retire(next(self.step))
            new = self.manager.allocate(num_new)
        if new is None:
            self.manager.release(held, next(self.step))
            return
        for at, item in enumerate(new, start=len(held)):
            self.contents[item] = (pages[: at + 1], salt)
        self.running.append(([*held, *new], pages, salt))

    @rule(data=st.data(), is_clean=st.booleans())
    def end(self, data: st.DataObject, is_clean: bool) -> None:
        if not self.running:
            return
        held, pages, salt = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if is_clean:
            self.index.insert(_prompt(*pages, rest=1), held, salt)
        else:
            self.index.forget([item.page for item in held], next(self.step))
        self.manager.release(held, next(self.step))
        self.manager.retire(next(self.step))

    @rule(num_pages=st.integers(0, 5))
    def evict(self, num_pages: int) -> None:
        before = set(self.index.held_pages)
        self.index.evict(num_pages, next(self.step))
        gone = before - set(self.index.held_pages)
        assert not gone & {item for held, _, _ in self.running for item in held}
        assert len(gone) <= num_pages

    @invariant()
    def pages_are_accounted_for(self) -> None:
        self.manager.check([*self.index.held_pages, *(item for held, _, _ in self.running for item in held)])


TestPrefixLives = PrefixLives.TestCase
TestPrefixLives.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
