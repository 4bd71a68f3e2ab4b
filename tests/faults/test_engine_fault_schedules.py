"""Random faults under the real scheduler, with a model that reads its tokens back from the pages."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import pytest
from engine_page_faults import (
    entry_outside_the_pool,
    lost_entry,
    padding_row,
    row_of,
    stale_entry,
    stale_record,
    swap_entries,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from page_faults import CountedTracker, force_free
from page_reading_model import expected_tokens, generated, greedy, new_core

from memopt.kernels.kv_cache.page_tags_reference import PageTagCheck
from memopt.runtime.engine.engine_core import EngineCore
from memopt.runtime.engine.request import Request
from memopt.runtime.integrity.choose_tracker import choose_tracker
from memopt.runtime.kv.prefix_index import prefix_namespace

NUM_PAGES, MAX_REQUESTS, ANSWER_TOKENS = 18, 4, 12
NUM_SCHEDULES = 100
TENANTS = ("", "", "other")
# Kinds 0 and 1 begin alike and share pages.
PROMPTS = ([*range(1, 71)], [*range(1, 91)] * 2, [5] * 60, [7] * 130)
ANSWERS = [expected_tokens(prompt, ANSWER_TOKENS) for prompt in PROMPTS]


class WitnessedTracker(CountedTracker):
    """Notes, at the time of each check, whose table leads elsewhere than to the pages that it was given."""

    def __init__(self, name: str) -> None:
        super().__init__(choose_tracker(name, NUM_PAGES, "cpu"), NUM_PAGES)
        self.core: EngineCore | None = None
        self.affected: set[int] = set()
        self.has_wrong_record: set[int] = set()
        self._given: dict[tuple[int, int], int] = {}

    def check(self, *tables: object) -> PageTagCheck | None:
        assert self.core is not None
        num_pages = self.core.pages.tables.num_pages.tolist()
        for request in self.core.scheduler.running:
            if num_pages[row_of(request)] and self._is_affected(request, num_pages[row_of(request)]):
                self.affected.add(request.request_id)
        return super().check(*tables)

    def _is_affected(self, request: Request, num_read: int) -> bool:
        assert self.core is not None
        table = self.core.pages.tables.pages[row_of(request)].tolist()
        is_affected = request.request_id in self.has_wrong_record
        for at, held in enumerate(request.pages[:num_read]):
            # A page is first seen here in the step in which the request was given it.
            given = self._given.setdefault((request.request_id, at), self.num_given_out[held.page])
            is_affected |= table[at] != held.page or self.num_given_out[held.page] != given
        return is_affected


def _reallocate(core: EngineCore, one: Request, two: Request) -> None:
    """Any page of a live request, shared or not; a newcomer may take it."""
    force_free(core.pages.manager, one.pages[two.request_id % len(one.pages)].page)
    core.submit(PROMPTS[2], greedy(ANSWER_TOKENS))


def _swap(core: EngineCore, one: Request, two: Request) -> None:
    swap_entries(core, one, two)


def _stale(core: EngineCore, one: Request, two: Request) -> None:
    stale_entry(core, one, two)


def _outside(core: EngineCore, one: Request, two: Request) -> None:
    entry_outside_the_pool(core, one)


def _lost(core: EngineCore, one: Request, two: Request) -> None:
    lost_entry(core, one)


def _record(core: EngineCore, one: Request, two: Request) -> None:
    stale_record(core, one)
    tracker = core.pages.tracker
    assert isinstance(tracker, WitnessedTracker)
    tracker.has_wrong_record.add(one.request_id)


def _free_once_more(core: EngineCore, one: Request, two: Request) -> None:
    """A holder gives a page back and keeps it: it is free, or another holder's share of it is gone."""
    held = one.pages[two.request_id % len(one.pages)]
    if core.pages.manager.is_held(held):
        core.pages.manager.release([held], core.num_steps)


def _padding(core: EngineCore, one: Request, two: Request) -> None:
    if len(core.scheduler.running) < MAX_REQUESTS:
        padding_row(core)


FAULTS: tuple[Callable[[EngineCore, Request, Request], None], ...] = (
    _reallocate, _reallocate, _swap, _stale, _outside, _lost, _record, _free_once_more, _padding,
)  # fmt: skip
# What the model would follow off its own table.
NEEDS_TAGS = {_outside}
EVENTS = st.lists(
    st.tuples(st.integers(0, 5 + len(FAULTS)), st.integers(0, 7), st.integers(0, 7)), min_size=4, max_size=14
)


def _run(name: str, events: list[tuple[int, int, int]], totals: Counter[str]) -> tuple[WitnessedTracker, list[Request]]:
    """Submissions and faults with a step after each, then to the end; pages are counted when all is over."""
    tracker = WitnessedTracker(name)
    core = new_core(
        NUM_PAGES,
        max_requests=MAX_REQUESTS,
        max_step_tokens=150,
        max_tokens=256,
        tracker=tracker,
        prefix_namespace=prefix_namespace("0" * 64, "bf16"),
    )
    tracker.core = core
    requests = []
    original = core.submit

    def submit(*arguments: object, **options: object) -> Request:
        requests.append(original(*arguments, **options))  # type: ignore[arg-type]
        return requests[-1]

    core.submit = submit  # type: ignore[method-assign,assignment]
    for kind, a, b in events:
        running = [request for request in core.scheduler.running if request.pages]
        if kind <= 4:
            core.submit(PROMPTS[a % len(PROMPTS)], greedy(ANSWER_TOKENS), tenant=TENANTS[b % len(TENANTS)])
        elif kind == 5 and b % 2 and requests:
            core.abort(requests[a % len(requests)].request_id)
        elif kind > 5 and running:
            fault = FAULTS[kind - 6]
            if name == "tagged" or fault not in NEEDS_TAGS:
                fault(core, running[a % len(running)], running[b % len(running)])
                totals[f"{name} faults"] += 1
        core.step()
    while core.has_work:
        core.step()
    # The index gives back what it still holds: then every page is free, or was lost to a fault.
    core.pages._make_free(NUM_PAGES)
    core.pages.check()
    manager = core.pages.manager
    assert manager.num_free + manager.num_quarantined == manager.num_pages
    totals[f"{name} lost pages"] += core.pages.counts.num_lost_pages
    return tracker, requests


def _has_wrong_answer(request: Request) -> bool:
    """Whether it ended as if all were well, with other tokens than its prompt leads to."""
    return (
        request.finish_reason == "length"
        and generated(request) != ANSWERS[PROMPTS.index(request.tokens[: request.num_prompt_tokens])]
    )


def test_random_faults_end_exactly_the_affected_requests(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="memopt.integrity")
    totals: Counter[str] = Counter()

    @settings(
        max_examples=NUM_SCHEDULES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(EVENTS)
    def one_schedule(events: list[tuple[int, int, int]]) -> None:
        tracker, requests = _run("tagged", events, totals)
        flagged = {request.request_id for request in requests if request.finish_reason == "page_mismatch"}
        assert flagged == tracker.affected
        assert not any(map(_has_wrong_answer, requests))
        totals["flagged"] += len(flagged)
        totals["finished"] += sum(request.finish_reason == "length" for request in requests)
        _, unchecked = _run("noop", events, totals)
        totals["wrong answers"] += sum(map(_has_wrong_answer, unchecked))

    one_schedule()
    assert totals["tagged faults"] > NUM_SCHEDULES
    assert totals["flagged"] > NUM_SCHEDULES // 2
    assert totals["finished"] > NUM_SCHEDULES
    assert totals["wrong answers"] > NUM_SCHEDULES // 10
    # A page that was freed early and that nobody took is missing when its request gives it back: its fault alone.
    assert totals["tagged lost pages"] > 0
