"""Pages that are freed behind their holder's back and that nobody takes: one request's fault, never the engine's."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

import pytest
import torch
from engine_page_faults import evict_shared, row_of
from page_faults import force_free, give_out_last
from page_reading_model import PageReadingModel, expected_tokens, generated, greedy, new_core
from torch import Tensor

from memopt.runtime.engine.engine_core import EngineCore
from memopt.runtime.engine.events import TokenEvent
from memopt.runtime.engine.request import Request, RequestState
from memopt.runtime.integrity.choose_tracker import choose_tracker
from memopt.runtime.integrity.mismatch import PREFIX_INDEX

NUM_PAGES = 24
PROMPT, OTHER_PROMPT = [*range(1, 91)] + [5] * 40, [7] * 60


def _core(tracker: str, num_pages: int = NUM_PAGES, **options: object) -> EngineCore:
    return new_core(num_pages, max_step_tokens=300, tracker=choose_tracker(tracker, num_pages, "cpu"), **options)


def _free_early(core: EngineCore, request: Request, place: int = 1) -> int:
    """The page is free, and the last that anybody is given."""
    page = request.pages[place].page
    assert force_free(core.pages.manager, page)
    give_out_last(core.pages.manager, page)
    return page


def _failed_step(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*_: object) -> Tensor:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(PageReadingModel, "forward", forward)
        with pytest.raises(MemoryError):
            core.step()


def _drain(core: EngineCore) -> list[TokenEvent]:
    events = []
    while core.has_work:
        events += core.step()
    core.pages.check()
    return events


def _lost_events(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    events = [json.loads(record.getMessage()) for record in caplog.records if record.name == "memopt.integrity"]
    assert {event["event"] for event in events} == {"page_lost"}
    return events


@pytest.mark.parametrize("tracker", ["tagged", "noop"])
def test_its_request_alone_is_told_of(tracker: str, caplog: pytest.LogCaptureFixture) -> None:
    """With tags every read was right, and so is the answer. Without them nobody knows, and it does not pass for one."""
    core = _core(tracker)
    request, other = core.submit(PROMPT, greedy(8)), core.submit(OTHER_PROMPT, greedy(12))
    core.step()
    held = request.pages[1]
    page = _free_early(core, request)
    events = _drain(core)
    ends = {event.request_id: event.finish_reason for event in events if event.finish_reason}
    assert ends == {
        request.request_id: "length" if tracker == "tagged" else "page_mismatch",
        other.request_id: "length",
    }
    assert request.finish_reason == ends[request.request_id]
    assert generated(request) == expected_tokens(PROMPT, 8)
    assert generated(other) == expected_tokens(OTHER_PROMPT, 12)
    (event,) = _lost_events(caplog)
    tag = f"{held.tag:#018x}"
    assert event == {
        "event": "page_lost", "request_id": str(request.request_id), "step": 8, "page_index": 1, "page": page,
        "expected": tag, "found": tag,
    }  # fmt: skip
    metrics = core.metrics()
    assert (metrics.integrity.num_lost_pages, metrics.integrity.num_mismatches) == (1, 0)
    assert metrics.capacity.num_quarantined_pages == 1
    assert metrics.capacity.num_used_pages == 0


def _abort(core: EngineCore, request: Request) -> None:
    event = core.abort(request.request_id)
    assert event is not None
    assert event.finish_reason == "abort"
    assert core.abort(request.request_id) is None


def _preempt(core: EngineCore, request: Request) -> None:
    core.scheduler._preempt(request)


def _finish(core: EngineCore, request: Request) -> None:
    """Nothing but its own end."""


@pytest.mark.parametrize("end", [_abort, _preempt, _finish])
@pytest.mark.parametrize("tracker", ["tagged", "noop"])
def test_however_a_request_ends(tracker: str, end: Callable[[EngineCore, Request], None]) -> None:
    core = _core(tracker, prefix_namespace=b"test")
    request, other = core.submit(PROMPT, greedy(8)), core.submit(OTHER_PROMPT, greedy(12))
    core.step()
    _free_early(core, request, 2)
    end(core, request)
    _drain(core)
    assert request.state is RequestState.FINISHED
    is_sound = end is not _abort and tracker == "tagged"
    assert request.finish_reason == ("length" if is_sound else "abort" if end is _abort else "page_mismatch")
    assert generated(request) == expected_tokens(PROMPT, 8)[: 1 if end is _abort else 8]
    assert (other.finish_reason, generated(other)) == ("length", expected_tokens(OTHER_PROMPT, 12))
    assert core.metrics().integrity.num_lost_pages == core.pages.manager.num_quarantined == 1


@pytest.mark.parametrize("tracker", ["tagged", "noop"])
def test_pages_held_for_a_hand_over(tracker: str) -> None:
    core = _core(tracker)
    request = core.submit(PROMPT, greedy(1), holds_pages=True)
    _drain(core)
    _free_early(core, request)
    core.release(request)
    core.release(request)
    core.pages.check()
    assert core.metrics().integrity.num_lost_pages == core.pages.manager.num_quarantined == 1


def test_all_holders_of_a_shared_page_are_told_of() -> None:
    """Two requests and the index held it; each gives back what is left, once."""
    core = _core("tagged", prefix_namespace=b"test")
    first = core.submit(PROMPT, greedy(20))
    core.step()
    second = core.submit(PROMPT, greedy(4))
    core.step()
    assert first.pages[:2] == second.pages[:2]
    evict_shared(core, second)
    give_out_last(core.pages.manager, second.pages[0].page)
    _drain(core)
    assert (first.finish_reason, second.finish_reason) == ("length", "length")
    assert core.metrics().integrity.num_lost_pages == 2
    assert core.pages.manager.num_quarantined == 1
    # What followed in the index went with it.
    third = core.submit(PROMPT, greedy(4))
    _drain(core)
    assert (third.num_reused_tokens, generated(third)) == (0, expected_tokens(PROMPT, 4))


@pytest.mark.parametrize("found_by", ["match", "evict"])
def test_a_page_of_the_index_alone(found_by: str, caplog: pytest.LogCaptureFixture) -> None:
    """Freed twice by a request that shared it: the index's hold is gone, and so are those who would have hit it."""
    core = _core("tagged", 7, prefix_namespace=b"test")
    prompt = PROMPT + OTHER_PROMPT + [3] * 3
    first = core.submit(prompt, greedy(4))
    core.step()
    held = first.pages[1 if found_by == "match" else 2]
    _drain(core)
    core.pages.manager.release([held], core.num_steps)
    give_out_last(core.pages.manager, held.page)
    # 5 of the 6 pages: more than are free, unless the index gives its own back.
    request = core.submit(prompt if found_by == "match" else OTHER_PROMPT * 5, greedy(4))
    _drain(core)
    assert request.finish_reason == "length"
    assert generated(request) == expected_tokens(request.tokens[: request.num_prompt_tokens], 4)
    assert request.num_reused_tokens == (64 if found_by == "match" else 0)
    (event,) = _lost_events(caplog)
    assert (event["request_id"], event["page"], event["page_index"]) == (PREFIX_INDEX, held.page, -1)
    assert core.pages.manager.num_quarantined == 1


def test_quarantine_until_nothing_is_left(caplog: pytest.LogCaptureFixture) -> None:
    """Requests end for the lack of pages, one by one; none hangs, and what still fits still runs."""
    caplog.set_level(logging.CRITICAL, logger="memopt.integrity")
    core = _core("tagged", 6, prefix_namespace=b"test")
    short, long = OTHER_PROMPT[:9], PROMPT + OTHER_PROMPT
    for number in range(core.pages.manager.num_pages):
        assert core.pages.num_usable == core.pages.manager.num_pages - number
        struck = core.submit(short, greedy(4))
        core.step()
        queued = [core.submit(long, greedy(40))] if core.pages.num_usable >= 4 else []
        core.pages.tables.expected[row_of(struck), 0] += 1
        _drain(core)
        assert struck.finish_reason == "page_mismatch"
        assert [one.finish_reason for one in queued] == (["length"] if number == 0 else ["capacity"])[: len(queued)]
    with pytest.raises(Exception, match="10 tokens need 1 pages of 64, but the cache has 0"):
        core.submit(short, greedy(1))
    late = core.enqueue(short, greedy(1))
    _drain(core)
    assert late.finish_reason == "capacity"


@pytest.mark.parametrize("prefix", [None, b"test"])
def test_a_step_that_failed_leaves_no_page_behind(prefix: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests can be aborted, and who comes next has all pages; or it is tried again, with the same tokens."""
    core = _core("tagged", 8, prefix_namespace=prefix)
    kept = core.submit(OTHER_PROMPT, greedy(6))
    core.step()
    long = core.submit(PROMPT * 2, greedy(6))
    _failed_step(core, monkeypatch)
    core.pages.check()
    _abort(core, long)
    assert core.pages.manager.num_fenced == 0
    last = core.submit(PROMPT * 2, greedy(6))
    for _ in range(20):
        core.step()
        core.pages.check()
    assert generated(kept) == expected_tokens(OTHER_PROMPT, 6)
    assert generated(last) == expected_tokens(PROMPT * 2, 6)


def test_the_end_of_a_request_is_told_though_the_step_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that no longer fits ends with the first step that succeeds, not in one whose events nobody gets."""
    core = _core("tagged", 6)
    kept = core.submit(OTHER_PROMPT, greedy(20))
    core.step()
    lost = core.submit(PROMPT * 2, greedy(4))
    core.pages.manager.quarantine(core.pages.manager._free[0])
    _failed_step(core, monkeypatch)
    ends = [(event.request_id, event.finish_reason) for event in _drain(core) if event.finish_reason]
    assert ends == [(lost.request_id, "capacity"), (kept.request_id, "length")]


def test_tenants_of_equal_prompts_share_nothing_whatever_their_names() -> None:
    core = _core("tagged", prefix_namespace=b"test")
    tenants = ["", "a", "A", "a\0", "é", "e\u0301", "\ud800", "\udc80", "?"]
    requests = []
    for tenant in tenants * 2:
        requests.append(core.submit(PROMPT[:70], greedy(2), tenant=tenant))
        _drain(core)
    assert [request.num_reused_tokens for request in requests] == [0] * len(tenants) + [64] * len(tenants)


@pytest.mark.parametrize("reason", ["page_mismatch", "nonfinite"])
def test_pages_of_a_request_that_went_wrong_are_not_reused(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were in the index since its prompt was computed: whoever asks the same computes it anew."""
    core = _core("tagged", prefix_namespace=b"test")
    struck = core.submit(PROMPT, greedy(4))
    core.step()
    index = core.pages.prefix_index
    assert index is not None
    assert index.num_pages == 2
    if reason == "page_mismatch":
        core.pages.tables.expected[row_of(struck), 2] += 1
        core.step()
    else:
        with monkeypatch.context() as patch:
            patch.setattr(PageReadingModel, "logits", lambda _, hidden: torch.full((len(hidden), 97), torch.nan))
            core.step()
    assert (struck.finish_reason, index.num_pages) == (reason, 0)
    again = core.submit(PROMPT, greedy(4))
    _drain(core)
    assert (again.num_reused_tokens, generated(again)) == (0, expected_tokens(PROMPT, 4))


def test_pages_of_generated_tokens_are_not_reused() -> None:
    """Computed again after a preemption, they stand behind a prompt's, but in another form than a prompt's would."""
    core = _core("tagged", prefix_namespace=b"test")
    request = core.submit(PROMPT, greedy(70))
    while request.num_generated < 66:
        core.step()
    core.scheduler._preempt(request)
    core.step()
    index = core.pages.prefix_index
    assert index is not None
    assert (len(request.pages), index.num_pages) == (4, 2)
    _drain(core)
    assert generated(request) == expected_tokens(PROMPT, 70)
