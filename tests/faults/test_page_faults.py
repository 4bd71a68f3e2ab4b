"""Faults in who owns which page: with tags exactly the affected requests end, without them answers go wrong."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable

import page_schedules
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from page_faults import NUM_PAGES, NUM_PROMPT_KINDS, PageSimulation, force_free, undisturbed_tokens
from page_schedules import FAULTS, Outcome, run_schedule

from memopt.errors import PageError
from memopt.kernels.layout import NO_TAG
from memopt.runtime.kv.page_manager import PageState

NUM_SCHEDULES = 10_000
# Every so many schedules are run without tags too.
NOOP_EVERY = 5
BYTES_AN_EVENT = 3


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of requests are flagged on purpose."""
    caplog.set_level(logging.CRITICAL, logger="memopt.integrity")


def _require_exact(simulation: PageSimulation, outcome: Outcome) -> None:
    """Flagged are the affected and nobody else; the others end with the tokens of an undisturbed run."""
    assert outcome.flagged == outcome.affected
    assert outcome.corrupted == frozenset()
    simulation.manager.check()
    assert len(simulation.mismatches) == len(outcome.flagged)
    for mismatch in simulation.mismatches:
        if 0 < mismatch.page < NUM_PAGES:
            assert simulation.manager._states[mismatch.page] is PageState.QUARANTINED


def test_ten_thousand_schedules() -> None:
    tried: Counter[str] = Counter()
    totals: Counter[str] = Counter()

    @settings(
        max_examples=NUM_SCHEDULES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.binary(min_size=3 * BYTES_AN_EVENT, max_size=8 * BYTES_AN_EVENT))
    def one_schedule(schedule: bytes) -> None:
        simulation, outcome = run_schedule("tagged", schedule)
        _require_exact(simulation, outcome)
        tried.update(outcome.faults)
        totals["schedules"] += 1
        totals["flagged"] += len(outcome.flagged)
        totals["finished"] += outcome.num_finished
        if totals["schedules"] % NOOP_EVERY == 0:
            _, unchecked = run_schedule("noop", schedule)
            assert not unchecked.flagged
            totals["corrupted"] += len(unchecked.corrupted)

    one_schedule()
    assert totals["schedules"] >= NUM_SCHEDULES
    assert set(tried) == {fault.__name__ for fault in FAULTS}
    # The test can fail: faults did end requests, left others alone, and did spoil answers where nobody looked.
    assert totals["flagged"] > NUM_SCHEDULES // 4
    assert totals["finished"] > NUM_SCHEDULES // 2
    assert totals["corrupted"] > NUM_SCHEDULES // NOOP_EVERY // 4


def _run(tracker: str, fault: Callable[[PageSimulation], object], kinds: tuple[int, ...] = (1, 3)) -> PageSimulation:
    """Requests of these kinds start one after the other, the fault strikes, and a newcomer takes a free page."""
    simulation = PageSimulation(tracker)
    for kind in kinds:
        simulation.submit(kind)
        simulation.step()
    fault(simulation)
    simulation.submit(2)
    simulation.drain()
    return simulation


def _stale(simulation: PageSimulation) -> None:
    """Request 0's table leads to the first page of request 1."""
    one, two = simulation.running
    simulation.tables.pages[one.row, 0] = two.pages[0].page


def _own_swap(simulation: PageSimulation) -> None:
    page_schedules.swap_own_entries(simulation, 0, 0)


def _swap_of_two(simulation: PageSimulation) -> None:
    page_schedules.swap_entries_of_two(simulation, 0, 0)


def _outside(simulation: PageSimulation) -> None:
    page_schedules.entry_outside_the_pool(simulation, 0, 0)


def _realloc(simulation: PageSimulation) -> None:
    page_schedules.reallocate(simulation, 0, 0)


def _lost(simulation: PageSimulation) -> None:
    page_schedules.lost_entry(simulation, 0, 0)


def _evicted_while_shared(simulation: PageSimulation) -> None:
    """Both requests, of equal prompts, read the page that the index gave away."""
    one, two = simulation.running
    assert simulation.manager.num_holders(one.pages[0].page) == 3
    assert one.pages[0] == two.pages[0]
    force_free(simulation.manager, one.pages[0].page)


def _double_free(simulation: PageSimulation) -> None:
    """One of two holders gives its page up twice, and the refusal is overridden: the other's page is free."""
    one, two = simulation.running
    held = one.pages[0]
    simulation.index.forget([held.page], simulation.step_number)
    one.pages.remove(held)
    one.owned.pop(0)
    simulation.tables.drop_row(one.row)
    simulation.running.remove(one)
    simulation.manager.release([held, *one.pages], simulation.step_number)
    with pytest.raises(PageError, match="cannot be freed"):
        simulation.manager.release([held, held], simulation.step_number)
    force_free(simulation.manager, two.pages[0].page)


# Fault, the kinds that run, the requests that must end, and whether answers go wrong without tags.
DIRECTED = [
    (_realloc, (1, 3), {0}),
    (_own_swap, (1, 3), {0}),
    (_swap_of_two, (1, 3), {0, 1}),
    (_stale, (1, 3), {0}),
    (_outside, (1, 3), {0}),
    (_lost, (1, 3), {0}),
    (_evicted_while_shared, (1, 1), {0, 1}),
]


@pytest.mark.parametrize(("fault", "kinds", "affected"), DIRECTED)
def test_each_fault_ends_its_requests_and_no_other(
    fault: Callable[[PageSimulation], None], kinds: tuple[int, ...], affected: set[int]
) -> None:
    simulation, unchecked = (_run(name, fault, kinds) for name in ("tagged", "noop"))
    assert simulation.flagged == simulation.affected == affected
    assert set(simulation.finished) == set(range(3)) - affected
    assert simulation.corrupted() == set()
    assert unchecked.flagged == set()
    assert unchecked.corrupted() & affected
    assert simulation.manager.num_quarantined >= (fault not in (_outside, _lost))


def test_freed_but_not_given_to_anybody_passes() -> None:
    """What a late step reads is still right; a check that cried here would abort healthy requests."""
    for tracker in ("tagged", "noop"):
        simulation = PageSimulation(tracker)
        simulation.submit(0)
        simulation.step()
        # The second page: the first, which the index holds too, would not be freed.
        page_schedules.free_only(simulation, 0, 1)
        simulation.drain()
        assert simulation.flagged == set()
        assert simulation.finished[0].tokens == undisturbed_tokens(0)
        assert (simulation.num_lost_pages, simulation.manager.num_quarantined) == (1, 1)
        simulation.manager.check(simulation.index.held_pages)


def test_a_padding_row_is_nobodys() -> None:
    simulation = _run("tagged", lambda simulation: page_schedules.padding_row(simulation, 3, NUM_PAGES + 9))
    assert simulation.flagged == set()
    assert simulation.corrupted() == set()
    assert set(simulation.finished) == {0, 1, 2}


def test_a_stale_record_ends_its_request() -> None:
    """The page is right and nothing is spoiled, but nobody could tell: a false alarm of one request, no more."""
    simulation = _run("tagged", lambda simulation: page_schedules.stale_record(simulation, 1, 0))
    assert simulation.flagged == {1}
    assert set(simulation.finished) == {0, 2}
    assert _run("noop", lambda simulation: page_schedules.stale_record(simulation, 1, 0)).corrupted() == set()


def test_a_page_freed_twice_by_one_of_two_holders() -> None:
    simulation = _run("tagged", _double_free, (1, 1))
    assert simulation.flagged == {1}
    assert simulation.corrupted() == set()
    assert _run("noop", _double_free, (1, 1)).corrupted() == {1}


def test_a_page_that_is_listed_as_free_twice_gets_no_second_owner() -> None:
    """The manager looks at the state of what it gives out; past that refusal, the tags tell the two owners apart."""
    simulation = PageSimulation("tagged")
    manager = simulation.manager
    page = manager._free[-1]
    manager._free.append(page)
    first = simulation.submit(2)
    simulation.step()
    assert first is not None
    assert first.pages[0].page == page
    with pytest.raises(PageError, match=f"page {page} is held, has 1 holders, and is listed as free"):
        manager.allocate(1)
    manager._states[page] = PageState.FREE
    second = simulation.submit(2)
    simulation.step()
    assert second is not None
    assert second.pages[0].page == page
    assert simulation.flagged == {first.number}
    simulation.drain()
    assert simulation.finished[second.number].tokens == undisturbed_tokens(2)


def test_an_undisturbed_run_is_what_prompts_alone_lead_to() -> None:
    """With requests that wait for pages, share prefixes and come and go."""
    for tracker in ("tagged", "noop"):
        simulation = PageSimulation(tracker)
        for number in range(12):
            while simulation.submit(number % NUM_PROMPT_KINDS) is None:
                simulation.step()
        simulation.drain()
        assert simulation.flagged == simulation.affected == simulation.corrupted() == set()
        assert len(simulation.finished) == 12
        assert simulation.num_lost_pages == 0
        assert simulation.index.counts.num_hit_tokens > 0
        simulation.manager.check(simulation.index.held_pages)


def test_the_event_names_request_page_tags_and_step(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="memopt.integrity")
    simulation = PageSimulation("tagged")
    simulation.submit(2)
    simulation.step()
    (request,) = simulation.running
    (held,) = request.pages
    simulation.tables.pages[request.row, 0] = 9
    simulation.drain()
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("memopt.integrity", "ERROR")
    event = json.loads(record.getMessage())
    assert list(event) == ["event", "request_id", "step", "page_index", "page", "expected", "found"]
    assert event == {
        "event": "page_mismatch",
        "request_id": "0",
        "step": 2,
        "page_index": 0,
        "page": 9,
        "expected": f"{held.tag:#018x}",
        "found": f"{NO_TAG:#018x}",
    }
