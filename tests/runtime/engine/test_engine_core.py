"""The engine's loop around a model that reads its tokens back from the pages."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_reading_model import EOS, PageReadingModel, expected_tokens, generated, greedy, new_core, run

from memopt.errors import CapacityError, UsageError
from memopt.kernels.layout import PAGE_TOKENS
from memopt.runtime.engine.request import RequestState
from memopt.runtime.engine.sampling_params import SamplingParams
from memopt.runtime.integrity.tagged_tracker import TaggedTracker


def prompt_of(length: int, first: int = 1) -> list[int]:
    return [(first + 7 * number) % 97 for number in range(length)]


def test_a_request_gets_the_tokens_of_its_own_text() -> None:
    core = new_core()
    request = core.submit(prompt_of(100), greedy(70))
    events = run(core)
    assert generated(request) == expected_tokens(prompt_of(100), 70)
    assert [event.token_id for event in events] == generated(request)
    assert [event.finish_reason for event in events] == [None] * 69 + ["length"]
    assert core.pages.manager.num_used == 0


def test_the_models_end_stops_a_request() -> None:
    for first in range(40):
        prompt = prompt_of(5, first)
        expected = expected_tokens(prompt, 200, eos=EOS)
        core = new_core()
        request = core.submit(prompt, SamplingParams(max_tokens=200))
        events = run(core)
        assert generated(request) == expected
        assert events[-1].finish_reason == ("stop" if expected[-1] == EOS else "length")
        if expected[-1] == EOS:
            return
    raise AssertionError("no prompt ended early: the test does not test the end")


REQUESTS = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 100), st.integers(0, 12)), min_size=1, max_size=9)


@settings(max_examples=40, deadline=None)
@given(
    requests=REQUESTS,
    num_pages=st.integers(6, 30),
    max_requests=st.integers(1, 5),
    extra_rows=st.integers(1, 150),
    is_tagged=st.booleans(),
    has_prefix_cache=st.booleans(),
)
def test_scheduling_never_changes_tokens_and_never_overcommits(
    requests: list[tuple[int, int, int]],
    num_pages: int,
    max_requests: int,
    extra_rows: int,
    is_tagged: bool,
    has_prefix_cache: bool,
) -> None:
    """Arrivals at any step, any chunk size, few pages: tokens are right, pages accounted for, everybody ends."""
    core = new_core(
        num_pages,
        max_requests=max_requests,
        max_step_tokens=max_requests + extra_rows,
        tracker=TaggedTracker(num_pages, "cpu") if is_tagged else None,
        prefix_namespace=b"test" if has_prefix_cache else None,
    )
    waiting = [(arrival, prompt_of(length, length % 3), count) for length, count, arrival in requests]
    submitted = []
    for step in range(20_000):
        for arrival, prompt, count in waiting:
            if arrival == step:
                submitted.append((core.submit(prompt, greedy(count)), prompt, count))
        core.step()
        core.pages.check()
        if len(submitted) == len(waiting) and not core.has_work:
            break
    for request, prompt, count in submitted:
        assert generated(request) == expected_tokens(prompt, count)
        assert request.finish_reason == "length"
    index = core.pages.prefix_index
    assert core.pages.manager.num_used == (0 if index is None else index.num_pages)


def test_few_pages_force_preemptions_and_tokens_stay_the_same() -> None:
    core = new_core(num_pages=8, max_requests=4)
    requests = [core.submit(prompt_of(50, first), greedy(100)) for first in range(4)]
    run(core)
    assert sum(request.num_preemptions for request in requests) > 0
    assert requests[0].num_preemptions == 0
    for first, request in enumerate(requests):
        assert generated(request) == expected_tokens(prompt_of(50, first), 100)


def test_decoding_goes_on_while_a_long_prompt_is_computed() -> None:
    core = new_core(max_requests=2, max_step_tokens=10)
    short = core.submit(prompt_of(5), greedy(30))
    core.step()
    long = core.submit(prompt_of(180), greedy(2))
    for _ in range(20):
        num_before, num_computed = short.num_generated, long.num_computed
        core.step()
        assert short.num_generated == num_before + 1
        assert long.num_computed >= num_computed + 9 or long.num_missing == 1
    model = core._runner._model
    assert isinstance(model, PageReadingModel)
    assert model.longest_step <= 10


def test_requests_start_in_the_order_in_which_they_came() -> None:
    core = new_core(num_pages=7, max_requests=8)
    requests = [core.submit(prompt_of(length), greedy(20)) for length in (180, 180, 5, 5)]
    core.step()
    assert [request.state for request in requests[1:]] == [RequestState.WAITING] * 3
    events = run(core)
    first_tokens = list(dict.fromkeys(event.request_id for event in events))
    assert first_tokens == sorted(first_tokens)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5, 10])
def test_abort_frees_the_pages_once_at_any_time(num_steps: int) -> None:
    core = new_core(max_requests=2, max_step_tokens=70)
    other = core.submit(prompt_of(30), greedy(40))
    request = core.submit(prompt_of(100, 3), greedy(50))
    queued = core.submit(prompt_of(100, 4), greedy(50))
    for _ in range(num_steps):
        core.step()
    for victim in (request, queued):
        event = core.abort(victim.request_id)
        assert event is not None
        assert (event.token_id, event.finish_reason) == (None, "abort")
        assert core.abort(victim.request_id) is None
        core.pages.check()
    run(core)
    assert core.pages.manager.num_used == 0
    assert generated(other) == expected_tokens(prompt_of(30), 40)


def test_abort_of_a_preempted_request() -> None:
    core = new_core(num_pages=7, max_requests=3)
    requests = [core.submit(prompt_of(60, first), greedy(100)) for first in range(3)]
    for _ in range(100):
        if not any(request.num_preemptions for request in requests):
            core.step()
    victim = next(request for request in requests if request.num_preemptions)
    assert victim.state is RequestState.WAITING
    assert core.abort(victim.request_id) is not None
    core.pages.check()
    run(core)
    assert core.pages.manager.num_used == 0


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        (prompt_of(1000), 25, "1,000 tokens and an answer of up to 25 make 1,025"),
        (prompt_of(400), 49, "449 tokens need 7 pages of 64, but the cache has 6"),
    ],
)
def test_a_request_that_could_never_fit_is_refused_at_once(prompt: list[int], max_tokens: int, message: str) -> None:
    core = new_core(num_pages=7)
    with pytest.raises(CapacityError, match=message):
        core.submit(prompt, greedy(max_tokens))
    assert not core.has_work
    request = core.submit(prompt_of(336), greedy(49))
    run(core)
    assert request.num_generated == 49


def test_bad_prompts_are_refused() -> None:
    core = new_core()
    with pytest.raises(UsageError, match="prompt is empty"):
        core.submit([], greedy(1))
    with pytest.raises(UsageError, match="token 1 of the prompt is 97"):
        core.submit([0, 97], greedy(1))
    with pytest.raises(UsageError, match="max_step_tokens is 8, but 8 decoding requests take 8"):
        new_core(max_step_tokens=8)


def test_equal_seeds_give_equal_tokens_whatever_else_runs() -> None:
    params = SamplingParams(max_tokens=40, temperature=1.3, top_p=0.9, seed=11, ignore_eos=True)
    alone = new_core()
    first = alone.submit(prompt_of(20), params)
    run(alone)
    crowd = new_core(num_pages=8, max_requests=4)
    others = [
        crowd.submit(prompt_of(30, seed), SamplingParams(max_tokens=60, temperature=1.0, seed=seed, ignore_eos=True))
        for seed in range(3)
    ]
    again = crowd.submit(prompt_of(20), params)
    run(crowd)
    assert generated(again) == generated(first)
    assert generated(first) != expected_tokens(prompt_of(20), 40)
    assert len({tuple(generated(request)[:20]) for request in others}) == 3


def test_a_prefix_hit_computes_less_and_gives_the_same_tokens() -> None:
    core = new_core(prefix_namespace=b"test", max_step_tokens=300)
    model = core._runner._model
    assert isinstance(model, PageReadingModel)
    prompt = prompt_of(200)
    first = core.submit(prompt, greedy(10), tenant="a")
    run(core)
    rows_of_first = model.rows_seen
    second = core.submit(prompt, greedy(10), tenant="a")
    run(core)
    assert second.num_reused_tokens == 192
    assert model.rows_seen - rows_of_first == rows_of_first - 192
    stranger = core.submit(prompt, greedy(10), tenant="b")
    run(core)
    assert stranger.num_reused_tokens == 0
    turn = prompt + generated(first) + [5, 6, 7]
    third = core.submit(turn, greedy(10), tenant="a")
    run(core)
    assert third.num_reused_tokens == 192
    assert generated(first) == generated(second) == generated(stranger) == expected_tokens(prompt, 10)
    assert generated(third) == expected_tokens(turn, 10)


def test_a_request_that_fits_alone_starts_whatever_the_prefix_index_gave_up_before() -> None:
    """In its first step: the index gives up all that it alone holds, in whatever order it has it."""
    core = new_core(num_pages=9, max_requests=3, max_step_tokens=600, prefix_namespace=b"test")
    running = core.submit(prompt_of(130), greedy(60))
    core.step()
    for prompt in (prompt_of(65, 3), prompt_of(66), prompt_of(193, 5)):
        request = core.submit(prompt, greedy(1))
        while request.state is not RequestState.FINISHED:
            core.step()
    assert running.state is RequestState.RUNNING
    run(core)
    large = prompt_of(8 * PAGE_TOKENS - 10, 11)
    request = core.submit(large, greedy(2))
    for _ in range(2):
        core.step()
    assert generated(request) == expected_tokens(large, 2)


def test_an_adopted_request_does_not_overtake_those_that_wait() -> None:
    """Else hand-overs, one after another, could keep a preempted request's pages from it for ever."""
    core = new_core(num_pages=6, max_requests=4)
    requests = [core.submit(prompt_of(60, first), greedy(100)) for first in range(3)]
    while not any(request.num_preemptions for request in requests):
        core.step()
    assert core.scheduler.waiting
    assert core.adopt(prompt_of(6), 5, greedy(3)) is None
    core.pages.check()
    run(core)
    assert core.adopt(prompt_of(6), 5, greedy(3)) is not None


def test_held_pages_stay_until_they_are_released_and_go_once() -> None:
    core = new_core(max_requests=1)
    request = core.submit(prompt_of(100), greedy(1), holds_pages=True)
    run(core)
    assert core.pages.manager.num_used == 2
    other = core.submit(prompt_of(70), greedy(3))
    run(core)
    assert generated(other) == expected_tokens(prompt_of(70), 3)
    core.release(request)
    core.release(request)
    core.pages.check()
    assert core.pages.manager.num_used == 0


def test_an_adopted_request_goes_on_from_pages_that_were_filled_elsewhere() -> None:
    prompt = prompt_of(100)
    sender, receiver = new_core(), new_core()
    sent = sender.submit(prompt, greedy(1), holds_pages=True)
    run(sender)
    taken = receiver.adopt(sent.tokens, len(prompt), greedy(20))
    assert taken is not None
    source, target = (core._runner._pools.layers[0].pool for core in (sender, receiver))  # type: ignore[union-attr]
    for from_page, to_page in zip(sent.pages, taken.pages, strict=True):
        target[to_page.page] = source[from_page.page]
    sender.release(sent)
    run(receiver)
    assert generated(taken) == expected_tokens(prompt, 20)
    assert receiver.adopt(prompt_of(1023), 1000, greedy(24)) is not None
    assert new_core(num_pages=20, max_requests=1).adopt(prompt_of(30), 10, greedy(50)) is not None
    full = new_core(max_requests=1)
    full.submit(prompt, greedy(5))
    full.step()
    assert full.adopt(sent.tokens, len(prompt), greedy(20)) is None
    full.pages.check()
