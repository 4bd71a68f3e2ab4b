"""Schedules of faults for tests/page_faults.py: what each fault does, and runs read from bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from page_faults import (
    MAX_REQUESTS,
    NUM_PAGES,
    NUM_PROMPT_KINDS,
    PageSimulation,
    SimulatedRequest,
    force_free,
    give_out_last,
)

from memopt.kernels.layout import NO_TAG
from memopt.runtime.kv.layer_kv import DUMMY_PAGE


def _target(simulation: PageSimulation, a: int) -> SimulatedRequest | None:
    """A running request that holds pages; the choice is deterministic."""
    holding = [request for request in simulation.running if request.pages]
    return holding[a % len(holding)] if holding else None


def reallocate(simulation: PageSimulation, a: int, b: int) -> None:
    """A live request's page is freed behind its back; whoever needs one next takes it, others share its fate."""
    if request := _target(simulation, a):
        force_free(simulation.manager, request.pages[b % len(request.pages)].page)


def reallocate_now(simulation: PageSimulation, a: int, b: int) -> None:
    """The same, and a new request takes the page before the next step."""
    reallocate(simulation, a, b)
    simulation.submit(2)


def evict_shared(simulation: PageSimulation, a: int, b: int) -> None:
    """A page that the index and perhaps requests hold is evicted without a look at the count, and goes to another."""
    pages = [held.page for held in simulation.index.held_pages]
    if pages:
        force_free(simulation.manager, pages[b % len(pages)])
        simulation.submit(a % NUM_PROMPT_KINDS)


def free_only(simulation: PageSimulation, a: int, b: int) -> None:
    """A page is freed while its request still reads it, as a late step does; alone, this must pass.

    The request no longer counts as a holder. Once somebody else is given the page, it is `reallocate`.
    """
    if request := _target(simulation, a):
        held = request.pages[b % len(request.pages)]
        if simulation.manager.num_holders(held.page) == 1 and force_free(simulation.manager, held.page):
            give_out_last(simulation.manager, held.page)


def swap_own_entries(simulation: PageSimulation, a: int, b: int) -> None:
    """Two entries of one request's table change places."""
    request = _target(simulation, a)
    if request and len(request.pages) > 1:
        i, j = b % len(request.pages), (b // 7 + 1 + b) % len(request.pages)
        row = simulation.tables.pages[request.row]
        row[[i, j]] = row[[j, i]]


def swap_entries_of_two(simulation: PageSimulation, a: int, b: int) -> None:
    """Entries of two requests change places."""
    one, two = _target(simulation, a), _target(simulation, a + 1)
    if one and two and one is not two:
        i, j = b % len(one.pages), b % len(two.pages)
        table = simulation.tables.pages
        table[one.row, i], table[two.row, j] = table[two.row, j].clone(), table[one.row, i].clone()


def stale_table(simulation: PageSimulation, a: int, b: int) -> None:
    """A row that was not written: it still leads to a page of whoever had it before."""
    if request := _target(simulation, a):
        simulation.tables.pages[request.row, a % len(request.pages)] = 1 + b % (NUM_PAGES - 1)


def entry_outside_the_pool(simulation: PageSimulation, a: int, b: int) -> None:
    """An entry that is no page at all."""
    if request := _target(simulation, a):
        bad = (-1, NUM_PAGES, NUM_PAGES + b, -(2**31), 2**31 - 1, 0)[b % 6]
        simulation.tables.pages[request.row, a % len(request.pages)] = bad


def stale_record(simulation: PageSimulation, a: int, b: int) -> None:
    """The expected tag is an older one: the page is right, but nobody can tell, so the request must end."""
    if request := _target(simulation, a):
        simulation.tables.expected[request.row, b % len(request.pages)] -= 1 + b
        request.has_wrong_record = True


def padding_row(simulation: PageSimulation, a: int, b: int) -> None:
    """Rubbish in a row that no request has, as a padded batch brings along: nobody may be flagged for it."""
    used = {request.row for request in simulation.running}
    if free := [row for row in range(MAX_REQUESTS) if row not in used]:
        simulation.tables.pages[free[a % len(free)]] = b
        simulation.tables.expected[free[a % len(free)]] = NO_TAG + a


def lost_entry(simulation: PageSimulation, a: int, b: int) -> None:
    """A page that the request was given but that never came to its row, nor its tag: the row still ends before it."""
    if request := _target(simulation, a):
        simulation.tables.pages[request.row, len(request.pages) - 1] = DUMMY_PAGE
        simulation.tables.expected[request.row, len(request.pages) - 1] = NO_TAG


FAULTS: tuple[Callable[[PageSimulation, int, int], None], ...] = (
    reallocate, reallocate_now, evict_shared, free_only, swap_own_entries, swap_entries_of_two, stale_table,
    entry_outside_the_pool, stale_record, padding_row, lost_entry,
)  # fmt: skip
# Events of a schedule: new requests and plain steps are likelier than faults.
NUM_SUBMITS, NUM_PLAIN_STEPS, NUM_ABORTS = 8, 4, 1
NUM_EVENTS = NUM_SUBMITS + NUM_PLAIN_STEPS + NUM_ABORTS + len(FAULTS)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run led to, by request numbers. `faults`: names of those that were tried."""

    flagged: frozenset[int]
    affected: frozenset[int]
    corrupted: frozenset[int]
    num_finished: int
    faults: frozenset[str]


def run_schedule(tracker_name: str, schedule: bytes) -> tuple[PageSimulation, Outcome]:
    """Three bytes an event: which one, and two numbers for its targets; a step after each, then steps to the end."""
    simulation = PageSimulation(tracker_name)
    tried: set[str] = set()
    for kind, a, b in zip(schedule[::3], schedule[1::3], schedule[2::3], strict=False):
        event = kind % NUM_EVENTS
        if event < NUM_SUBMITS:
            simulation.submit(a % NUM_PROMPT_KINDS)
        elif event >= NUM_EVENTS - len(FAULTS):
            fault = FAULTS[event - (NUM_EVENTS - len(FAULTS))]
            fault(simulation, a, b)
            tried.add(fault.__name__)
        elif event >= NUM_SUBMITS + NUM_PLAIN_STEPS and simulation.running:
            simulation.abort(simulation.running[a % len(simulation.running)])
        simulation.step()
    simulation.drain()
    return simulation, Outcome(
        frozenset(simulation.flagged),
        frozenset(simulation.affected),
        frozenset(simulation.corrupted()),
        len(simulation.finished),
        frozenset(tried),
    )
