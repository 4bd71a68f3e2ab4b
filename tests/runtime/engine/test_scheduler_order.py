"""Who goes first when pages are few, and how requests end that can no longer go on."""

from __future__ import annotations

import math

import pytest
import torch
from page_reading_model import PageReadingModel, expected_tokens, generated, greedy, new_core, run
from torch import Tensor

from memopt.runtime.engine.engine_core import EngineCore
from memopt.runtime.engine.request import Request, RequestState
from memopt.runtime.kv.layer_kv import KvPools
from memopt.runtime.model.step_rows import StepRows


def prompt_of(length: int, first: int = 1) -> list[int]:
    return [(first + 7 * number) % 97 for number in range(length)]


def step_until_preempted(core: EngineCore, requests: list[Request]) -> Request:
    for _ in range(200):
        core.step()
        found = [request for request in requests if request.num_preemptions]
        if found:
            return found[0]
    raise AssertionError("nobody was preempted")


def test_a_preempted_request_waits_ahead_of_those_that_came_later() -> None:
    core = new_core(num_pages=5, max_requests=2)
    older, newer, later = (core.submit(prompt_of(60, first), greedy(100)) for first in range(3))
    assert step_until_preempted(core, [older, newer, later]) is newer
    assert list(core.scheduler.waiting) == [newer, later]
    assert core.metrics().performance.num_preemptions == 1
    run(core)
    # Each was in the queue once: a second start is none.
    assert core.metrics().performance.queue_time.num_recorded == 3
    assert core.metrics().performance.time_to_first_token.num_recorded == 3
    for first, request in enumerate((older, newer, later)):
        assert generated(request) == expected_tokens(prompt_of(60, first), 100)


def test_a_start_leaves_a_page_for_each_running_request() -> None:
    """Else it would be preempted within 64 tokens, and all that it computed be thrown away."""
    core = new_core(num_pages=4, max_requests=3, max_step_tokens=300)
    first, second, third = (core.submit(prompt_of(60, number), greedy(4)) for number in range(3))
    core.step()
    # One page each, and one is left for the first; a third request would take it.
    assert [request.state for request in (first, second, third)] == [
        RequestState.RUNNING, RequestState.RUNNING, RequestState.WAITING,
    ]  # fmt: skip
    run(core)
    assert core.metrics().performance.num_preemptions == 0


def test_requests_that_no_longer_fit_end_when_pages_are_quarantined() -> None:
    """One that runs, when it needs a further page; one that waits, when its turn comes; what fits goes on."""
    core = new_core(num_pages=6, max_requests=1)
    running, waiting, small = (
        core.submit(prompt_of(length), greedy(count)) for length, count in ((60, 200), (250, 5), (30, 10))
    )
    core.step()
    for page in range(1, 6):
        if page not in {held.page for held in running.pages} and core.pages.manager.num_quarantined < 3:
            core.pages.manager.quarantine(page)
    run(core)
    assert [request.finish_reason for request in (running, waiting, small)] == ["capacity", "capacity", "length"]
    # Two pages were left: 128 tokens have their keys there, and one more was sampled.
    assert generated(running) == expected_tokens(prompt_of(60), 69)
    assert generated(waiting) == []
    assert generated(small) == expected_tokens(prompt_of(30), 10)
    assert core.pages.manager.num_used == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_end_their_request_alone(bad: float) -> None:
    """Its token is not given out, and its pages leave the prefix index."""
    core = new_core(max_requests=2, prefix_namespace=b"test")
    victim, other = (core.submit(prompt_of(70, first), greedy(8)) for first in range(2))

    class Spoiled(PageReadingModel):
        def logits(self, hidden: Tensor) -> Tensor:
            logits = super().logits(hidden)
            if victim.num_generated == 3 and victim.state is RequestState.RUNNING:
                logits[0, 5] = bad
            return logits

    core._runner._model = Spoiled()
    events = run(core)
    mine = [event for event in events if event.request_id == victim.request_id]
    assert [event.finish_reason for event in mine] == [None] * 3 + ["nonfinite"]
    assert mine[-1].token_id is None
    assert generated(victim) == expected_tokens(prompt_of(70, 0), 3)
    assert generated(other) == expected_tokens(prompt_of(70, 1), 8)
    assert core.pages.prefix_index is not None
    # The other's full page alone is kept.
    assert core.pages.prefix_index.num_pages == core.pages.manager.num_used == 1


class GivenDrafts:
    """A drafter that always guesses the same token."""

    def __init__(self, token: int) -> None:
        self._token = token

    def draft(self, hidden: Tensor, next_tokens: Tensor, rows: StepRows, pools: KvPools, sampled: Tensor) -> Tensor:
        return torch.full_like(sampled, self._token)


@pytest.mark.parametrize("is_draft_right", [False, True])
def test_logits_behind_a_draft_that_are_not_finite_count_only_if_the_draft_was_right(is_draft_right: bool) -> None:
    expected = expected_tokens(prompt_of(70), 6)
    draft = expected[2] if is_draft_right else next(token for token in range(97) if token not in expected)
    core = new_core(max_requests=1, num_drafts=1, drafter=GivenDrafts(draft))
    request = core.submit(prompt_of(70), greedy(6))

    class Spoiled(PageReadingModel):
        def logits(self, hidden: Tensor) -> Tensor:
            logits = super().logits(hidden)
            if request.num_generated == 2:
                logits[1, 5] = math.nan
            return logits

    core._runner._model = Spoiled()
    run(core)
    assert request.finish_reason == ("nonfinite" if is_draft_right else "length")
    assert generated(request) == expected[: 3 if is_draft_right else 6]
    assert core.pages.manager.num_used == 0
