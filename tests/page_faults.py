"""Requests that read and write pages through block tables, without a model: faults, and what they must lead to.

A token's "keys" are one number in a page. Each step stores the keys of a request's newest tokens through its table,
reads all of its keys back through the same table, and makes the next tokens of what it read. So another's page, a page
in the wrong place or a stale one changes the answer. What the answer must be follows from the prompt alone
(`undisturbed_tokens`), and who is affected from a record that knows neither tags nor tables (`_is_affected`).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from memopt.kernels.kv_cache.page_tags_reference import PageTagCheck
from memopt.kernels.layout import PAGE_TOKENS
from memopt.runtime.integrity.choose_tracker import choose_tracker
from memopt.runtime.integrity.mismatch import PageMismatch, describe_mismatch, log_mismatch
from memopt.runtime.integrity.tracker import PageTracker
from memopt.runtime.kv.block_tables import BlockTables
from memopt.runtime.kv.held_page import HeldPage
from memopt.runtime.kv.page_manager import PageManager, PageState
from memopt.runtime.kv.prefix_index import PrefixIndex, prefix_namespace

NUM_PAGES, MAX_REQUESTS, MAX_PAGES = 16, 4, 5
# Tokens of one step of a request: pages fill within a few steps.
STEP_TOKENS = 24
NUM_NEW_TOKENS = 4 * STEP_TOKENS
# Prompts of the same kind are equal and share pages; kinds 0 and 1 also begin alike.
PROMPT_LENGTHS = (70, 140, 40, 129)
NUM_PROMPT_KINDS = len(PROMPT_LENGTHS)


def prompt_of(kind: int) -> list[int]:
    """The prompt of a kind."""
    first = 1 if kind == 0 else kind
    return [first * 10_000 + position for position in range(PROMPT_LENGTHS[kind])]


def keys_of(tokens: Sequence[int], first_position: int = 0) -> np.ndarray:
    """What is stored for these consecutive tokens of one sequence, int64 [n]."""
    return np.asarray(tokens, dtype=np.int64) * 1_000_003 + np.arange(first_position, first_position + len(tokens))


def next_tokens(keys: np.ndarray) -> list[int]:
    """The tokens of a step that read these keys."""
    first = zlib.crc32(np.ascontiguousarray(keys).tobytes())
    return list(range(first, first + STEP_TOKENS))


def undisturbed_tokens(kind: int) -> list[int]:
    """Prompt and answer of a request that reads what it wrote."""
    tokens = prompt_of(kind)
    for _ in range(NUM_NEW_TOKENS // STEP_TOKENS):
        tokens += next_tokens(keys_of(tokens))
    return tokens


def force_free(manager: PageManager, page: int) -> bool:
    """What a double free does that nobody refuses: the page is free, whoever holds it. False: it is not held."""
    if manager._states[page] is not PageState.HELD:
        return False
    manager._num_holders[page] = 0
    manager._states[page] = PageState.FREE
    manager._free.append(page)
    return True


def give_out_last(manager: PageManager, page: int) -> None:
    """Moves a free page behind all others."""
    manager._free.remove(page)
    manager._free.insert(0, page)


class CountedTracker:
    """Any tracker, and beside it how often each page was given out: the truth that tags are compared with."""

    def __init__(self, tracker: PageTracker, num_pages: int) -> None:
        self._tracker = tracker
        self.num_given_out = [0] * num_pages

    @property
    def is_checking(self) -> bool:
        return self._tracker.is_checking

    @property
    def is_known_clean(self) -> bool:
        return self._tracker.is_known_clean

    def on_allocate(self, pages: Sequence[int]) -> Sequence[int]:
        for page in pages:
            self.num_given_out[page] += 1
        return self._tracker.on_allocate(pages)

    def tag_of(self, page: int) -> int:
        return self._tracker.tag_of(page)

    def check(self, *tables: object) -> PageTagCheck | None:
        return self._tracker.check(*tables)  # type: ignore[arg-type]


@dataclass(eq=False, slots=True)
class SimulatedRequest:
    """`owned`: page and how often it had been given out, as the request got it. `has_wrong_record`: a fault said so."""

    number: int
    kind: int
    tokens: list[int]
    row: int
    pages: list[HeldPage] = field(default_factory=list)
    owned: list[tuple[int, int]] = field(default_factory=list)
    num_stored: int = 0
    has_wrong_record: bool = False


class PageSimulation:
    """An engine's bookkeeping around imaginary keys; the order of a step is that of engine/engine_core.py."""

    def __init__(self, tracker_name: str) -> None:
        self.tracker = CountedTracker(choose_tracker(tracker_name, NUM_PAGES, "cpu"), NUM_PAGES)
        self.manager = PageManager(NUM_PAGES, self.tracker)
        self.tables = BlockTables(MAX_REQUESTS, MAX_PAGES, "cpu")
        self.index = PrefixIndex(prefix_namespace("0" * 64, "bf16"), self.manager)
        self.keys = np.zeros((NUM_PAGES, PAGE_TOKENS), dtype=np.int64)
        # The table's own memory.
        self._page_ids = self.tables.pages.numpy()
        self.running: list[SimulatedRequest] = []
        self.finished: dict[int, SimulatedRequest] = {}
        self.mismatches: list[PageMismatch] = []
        self.flagged: set[int] = set()
        self.affected: set[int] = set()
        self.num_lost_pages = 0
        self.num_submitted = 0
        self.step_number = 0

    def submit(self, kind: int) -> SimulatedRequest | None:
        """A new request, if there is a row for it."""
        if len(self.running) == MAX_REQUESTS:
            return None
        request = SimulatedRequest(self.num_submitted, kind, prompt_of(kind), self.tables.add_row())
        self.num_submitted += 1
        self._take(request, self.index.match(request.tokens))
        request.num_stored = len(request.pages) * PAGE_TOKENS
        self.running.append(request)
        return request

    def abort(self, request: SimulatedRequest) -> None:
        """The caller's wish: pages go back, none stays in the index."""
        self.index.forget([held.page for held in request.pages], self.step_number)
        self._end(request)

    def step(self) -> None:
        """Hold pages, compare tags, store, read, and apply what was found."""
        self.step_number += 1
        ready = [request for request in self.running if self._find_pages(request)]
        self.affected |= {request.number for request in self.running if self._is_affected(request)}
        self.tables.set_reads({request.row: len(request.pages) for request in self.running})
        check = self.tracker.check(self.tables.pages, self.tables.num_pages, self.tables.expected)
        flags = check.flags.tolist() if check is not None else [0] * MAX_REQUESTS
        ready = [request for request in ready if not flags[request.row]]
        for request in ready:
            self._store(request)
        answers = [next_tokens(self._read(request)) for request in ready]
        self.manager.retire(self.step_number)
        for request in list(self.running):
            if check is not None and flags[request.row]:
                self._end_flagged(request, int(check.first_mismatch[request.row]))
        for request, tokens in zip(ready, answers, strict=True):
            if request.num_stored == 0:
                self.index.insert(request.tokens, request.pages)
            request.num_stored = len(request.tokens)
            request.tokens += tokens
            if len(request.tokens) == PROMPT_LENGTHS[request.kind] + NUM_NEW_TOKENS:
                self.finished[request.number] = request
                self._end(request)

    def drain(self) -> None:
        """Steps until nothing runs, or nothing can: pages may be lost to quarantine."""
        for _ in range(3 * MAX_REQUESTS * NUM_NEW_TOKENS // STEP_TOKENS):
            if not self.running:
                return
            self.step()

    def corrupted(self) -> set[int]:
        """Requests that ended as if all were well, with other tokens than they should have."""
        return {n for n, request in self.finished.items() if request.tokens != undisturbed_tokens(request.kind)}

    def _find_pages(self, request: SimulatedRequest) -> bool:
        num_lacking = -(-len(request.tokens) // PAGE_TOKENS) - len(request.pages)
        if num_lacking > self.manager.num_free:
            self.index.evict(num_lacking - self.manager.num_free, self.step_number - 1)
        pages = self.manager.allocate(max(num_lacking, 0))
        self._take(request, pages or ())
        return pages is not None

    def _take(self, request: SimulatedRequest, pages: Sequence[HeldPage]) -> None:
        request.pages += pages
        request.owned += ((held.page, self.tracker.num_given_out[held.page]) for held in pages)
        self.tables.extend(request.row, pages)

    def _is_affected(self, request: SimulatedRequest) -> bool:
        """Whether its table leads anywhere but to its own pages, or one of them was given to somebody else since."""
        table = self._page_ids[request.row].tolist()
        return request.has_wrong_record or any(
            table[at] != page or self.tracker.num_given_out[page] != num_given_out
            for at, (page, num_given_out) in enumerate(request.owned)
        )

    def _table(self, request: SimulatedRequest) -> np.ndarray:
        """Page ids as a kernel without checks follows them: an id outside the pool leads somewhere all the same."""
        return self._page_ids[request.row, : len(request.pages)] % NUM_PAGES

    def _store(self, request: SimulatedRequest) -> None:
        positions = np.arange(request.num_stored, len(request.tokens))
        page = self._table(request)[positions // PAGE_TOKENS]
        self.keys[page, positions % PAGE_TOKENS] = keys_of(request.tokens[request.num_stored :], request.num_stored)

    def _read(self, request: SimulatedRequest) -> np.ndarray:
        return self.keys[self._table(request)].reshape(-1)[: len(request.tokens)]

    def _end_flagged(self, request: SimulatedRequest, first_mismatch: int) -> None:
        mismatch = describe_mismatch(
            self.tables, self.tracker, request.row, first_mismatch, str(request.number), self.step_number
        )
        log_mismatch(mismatch)
        self.mismatches.append(mismatch)
        self.flagged.add(request.number)
        if self.manager.quarantine(mismatch.page):
            self.index.forget([mismatch.page], self.step_number)
        self.index.forget([held.page for held in request.pages], self.step_number)
        self.manager.release_own(request.pages, self.step_number)
        self._leave(request)

    def _end(self, request: SimulatedRequest) -> None:
        lost = self.manager.release_own(request.pages, self.step_number)
        for place in lost:
            self.index.forget([request.pages[place].page], self.step_number)
            self.manager.quarantine(request.pages[place].page)
        self.num_lost_pages += len(lost)
        self._leave(request)

    def _leave(self, request: SimulatedRequest) -> None:
        request.pages = []
        self.tables.drop_row(request.row)
        self.running.remove(request)
