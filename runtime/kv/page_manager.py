"""Who holds which page: allocation, reference counts, fenced frees, quarantine. Page ids only, no data."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from enum import IntEnum

from memopt.errors import PageError, UsageError
from memopt.kernels.layout import NO_TAG
from memopt.runtime.integrity.tracker import PageTracker
from memopt.runtime.kv.held_page import HeldPage
from memopt.runtime.kv.layer_kv import DUMMY_PAGE


class PageState(IntEnum):
    """Where a page is in its life (docs/page-life.md)."""

    FREE = 0
    HELD = 1
    # Nobody holds it any more, but a step that was launched before may still read it.
    FENCED = 2
    # Never given out again; whoever still holds it may finish.
    QUARANTINED = 3


class PageManager:
    """Pages 1 to `num_pages` - 1; page 0 is DUMMY_PAGE and nobody's.

    The page that was freed last is given out first: a cache that is never full touches little of its memory.
    Every operation takes the same time whatever the number of pages, but for `quarantine` and `check`.
    """

    def __init__(self, num_pages: int, tracker: PageTracker) -> None:
        if num_pages <= DUMMY_PAGE + 1:
            raise UsageError(f"{num_pages} pages: one is the dummy page, at least one more is needed")
        self._tracker = tracker
        self._free = list(range(num_pages - 1, DUMMY_PAGE, -1))
        self._fenced: deque[tuple[int, int]] = deque()
        self._finished_step = -1
        self._states = [PageState.FREE] * num_pages
        self._num_holders = [0] * num_pages
        self._tags = [NO_TAG] * num_pages
        self._num_quarantined = 0
        self._peak_used = 0

    @property
    def num_pages(self) -> int:
        """Pages that can be given out, whatever their state: the dummy page is not among them."""
        return len(self._states) - 1

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can give out now."""
        return len(self._free)

    @property
    def num_fenced(self) -> int:
        """Pages that become free when the steps that may read them have finished."""
        return len(self._fenced)

    @property
    def num_quarantined(self) -> int:
        """Pages that are lost to this engine, those included that somebody still holds."""
        return self._num_quarantined

    @property
    def num_used(self) -> int:
        """Pages that somebody holds and that are not quarantined."""
        return self.num_pages - self.num_free - self.num_fenced - self.num_quarantined

    @property
    def peak_used(self) -> int:
        """The largest `num_used` so far."""
        return self._peak_used

    def num_holders(self, page: int) -> int:
        """How many hold the page: requests, and the prefix index."""
        return self._num_holders[page]

    def is_held(self, held: HeldPage) -> bool:
        """Whether that page is still held as the one that was given out under that tag."""
        return (
            DUMMY_PAGE < held.page < len(self._states)
            and self._num_holders[held.page] > 0
            and self._tags[held.page] == held.tag
        )

    def can_share(self, held: HeldPage) -> bool:
        """Whether `share` would take it: held under that tag, and not quarantined."""
        return self.is_held(held) and self._states[held.page] is not PageState.QUARANTINED

    def allocate(self, count: int) -> tuple[HeldPage, ...] | None:
        """`count` pages with new tags, each with one holder; None, and nothing changed, if fewer are free.

        PageError if a page stands among the free ones that is not free, or stands there twice: it would get two owners.
        """
        if count < 0:
            raise UsageError(f"{count} pages cannot be allocated")
        if count > len(self._free):
            return None
        pages = self._free[len(self._free) - count :][::-1]
        if len(set(pages)) != count:
            raise PageError(
                f"one of the pages {pages} is listed as free twice",
                remedy="somebody freed it twice; the engine must stop",
            )
        for page in pages:
            if self._states[page] is not PageState.FREE:
                raise PageError(
                    f"page {page} is {self._states[page].name.lower()}, has {self._num_holders[page]} holders, and is "
                    "listed as free",
                    remedy="somebody freed it twice; the engine must stop",
                )
        tags = self._tracker.on_allocate(pages)
        del self._free[len(self._free) - count :]
        for page, tag in zip(pages, tags, strict=True):
            self._states[page] = PageState.HELD
            self._num_holders[page] = 1
            self._tags[page] = tag
        self._peak_used = max(self._peak_used, self.num_used)
        return tuple(map(HeldPage, pages, tags))

    def share(self, held: HeldPage) -> None:
        """One more holder. PageError if the page is not held under that tag, or is quarantined."""
        self._require_held(held, "shared")
        if self._states[held.page] is PageState.QUARANTINED:
            raise PageError(f"page {held.page} is quarantined and cannot be shared", remedy="take it out of the index")
        self._num_holders[held.page] += 1

    def release(self, pages: Iterable[HeldPage], step: int) -> None:
        """One holder less of each; a page that nobody holds is free once `retire` was told that `step` has finished.

        `step`: the last step launched, which may still read the pages. Raises PageError at the first page that its
        holder does not hold (freed twice, or given to somebody else since); the pages before it are released.
        """
        for held in pages:
            self._require_held(held, "freed")
            self._drop(held.page, step)

    def release_own(self, pages: Sequence[HeldPage], step: int) -> tuple[int, ...]:
        """As `release`, but pages that the holder does not hold any more are left alone, and the others released.

        Returns the places in `pages` of those that were left: freed early, or somebody else's by now.
        """
        lost = []
        for place, held in enumerate(pages):
            if self.is_held(held):
                self._drop(held.page, step)
            else:
                lost.append(place)
        return tuple(lost)

    def retire(self, finished_step: int) -> None:
        """Steps up to `finished_step` have finished: pages fenced by them are free."""
        self._finished_step = max(self._finished_step, finished_step)
        while self._fenced and self._fenced[0][0] <= self._finished_step:
            _, page = self._fenced.popleft()
            self._states[page] = PageState.FREE
            self._free.append(page)

    def quarantine(self, page: int) -> bool:
        """The page is never given out again. False for what never is: the dummy page, a number outside the pool.

        Its holders, if it has any, go on: a page that somebody else read is not wrong for its owner.
        """
        if not DUMMY_PAGE < page < len(self._states):
            return False
        state = self._states[page]
        if state is PageState.QUARANTINED:
            return True
        if state is PageState.FREE:
            self._free.remove(page)
        elif state is PageState.FENCED:
            self._fenced = deque(entry for entry in self._fenced if entry[1] != page)
        self._states[page] = PageState.QUARANTINED
        self._num_quarantined += 1
        return True

    def check(self, held: Iterable[HeldPage] | None = None) -> None:
        """Recounts everything. PageError unless free + used + fenced + quarantined is the number of pages.

        `held`: the pages that all holders together believe they hold, once for each holder; counts and tags must agree.
        """
        states = Counter(self._states[DUMMY_PAGE + 1 :])
        found = {state: states[state] for state in PageState}
        told = {
            PageState.FREE: self.num_free,
            PageState.HELD: self.num_used,
            PageState.FENCED: self.num_fenced,
            PageState.QUARANTINED: self.num_quarantined,
        }
        if found != told:
            raise PageError(f"pages by state are {_counted(found)}, but the lists say {_counted(told)}")
        listed = [*self._free, *(page for _, page in self._fenced)]
        if len(set(listed)) != len(listed) or any(
            self._states[page] not in (PageState.FREE, PageState.FENCED) for page in listed
        ):
            raise PageError("a page is listed as free twice, or while somebody holds it")
        for page in range(DUMMY_PAGE + 1, len(self._states)):
            count, state = self._num_holders[page], self._states[page]
            is_held_as_told = (count > 0) == (state is PageState.HELD) or state is PageState.QUARANTINED
            if count < 0 or not is_held_as_told:
                raise PageError(f"page {page} is {state.name.lower()} and has {count} holders")
        if held is not None:
            self._check_holders(held)

    def _check_holders(self, held: Iterable[HeldPage]) -> None:
        believed: Counter[int] = Counter()
        for item in held:
            self._require_held(item, "checked")
            believed[item.page] += 1
        for page, count in enumerate(self._num_holders):
            if believed[page] != count:
                raise PageError(f"page {page} has {count} holders on record, but {believed[page]} hold it")

    def _require_held(self, held: HeldPage, action: str) -> None:
        if self.is_held(held):
            return
        page = held.page
        if not DUMMY_PAGE < page < len(self._states):
            raise PageError(f"page {page} cannot be {action}: pages that are given out are 1 to {self.num_pages}")
        raise PageError(
            f"page {page} cannot be {action}: it is {self._states[page].name.lower()}, has {self._num_holders[page]} "
            f"holders and tag {self._tags[page]:#x}, and the caller holds it under tag {held.tag:#x}",
            remedy="somebody gave the page back twice",
        )

    def _drop(self, page: int, step: int) -> None:
        self._num_holders[page] -= 1
        if self._num_holders[page] or self._states[page] is PageState.QUARANTINED:
            return
        if step <= self._finished_step:
            self._states[page] = PageState.FREE
            self._free.append(page)
            return
        # A later fence is always safe; with steps in order the oldest is at the front.
        fence = max(step, self._fenced[-1][0]) if self._fenced else step
        self._states[page] = PageState.FENCED
        self._fenced.append((fence, page))


def _counted(states: dict[PageState, int]) -> str:
    return ", ".join(f"{count} {state.name.lower()}" for state, count in states.items())
