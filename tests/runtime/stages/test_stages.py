"""Prefill and decode as two engines: the same tokens as one, and every page given back once and in time."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hand_over_cases import MODEL, gqa_pools, mla_pools, pooled_core
from hypothesis import given, settings
from hypothesis import strategies as st
from page_reading_model import EOS, expected_tokens
from page_transports import TRANSPORTS
from refusals import refusal
from stage_pairs import Stages, greedy, prompt_of, stages, wait_until_offered, wait_until_taken

from memopt.errors import PeerError, UnsupportedError, UsageError
from memopt.kernels.kv_formats import BF16, FP8_DS_MLA, FP8_E4M3, FP32, KvFormat
from memopt.runtime.engine.sampling_params import SamplingParams
from memopt.runtime.integrity.tagged_tracker import TaggedTracker
from memopt.runtime.integrity.tracker import NoopTracker
from memopt.runtime.stages import prefill_stage
from memopt.runtime.stages.decode_stage import DecodeEvent, DecodeStage
from memopt.runtime.stages.page_transport_local import local_transport
from memopt.runtime.stages.prefill_stage import PrefillStage


@pytest.mark.parametrize("kind", TRANSPORTS)
@pytest.mark.parametrize("kv_format", [BF16, FP8_E4M3, FP8_DS_MLA])
def test_tokens_are_those_of_one_engine(kind: str, kv_format: KvFormat) -> None:
    with stages(kind, kv_format=kv_format) as pair:
        lengths = {"a": 1, "b": 64, "c": 65, "d": 200, "e": 130}
        for name, length in lengths.items():
            pair.prefill.submit(name, prompt_of(length), greedy(30))
        pair.run()
        for name, length in lengths.items():
            assert pair.tokens(name) == expected_tokens(prompt_of(length), 30)
            assert pair.reason(name) == "length"
            assert pair.states(name) == ["offered", "taken"]
        assert pair.prefill_core.pages.manager.num_used == 0
        assert pair.decode_core.pages.manager.num_used == 0


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_pages_stay_until_the_answer_has_come(kind: str) -> None:
    with stages(kind) as pair:
        pair.prefill.submit("a", prompt_of(150), greedy(9))
        wait_until_offered(pair, "a")
        for _ in range(5):
            pair.step_prefill()
            assert pair.prefill_core.pages.manager.num_used == 3
        assert pair.prefill.num_offered == 1
        assert pair.prefill.has_work
        wait_until_taken(pair, "a")
        assert pair.prefill_core.pages.manager.num_used == 0
        assert not pair.prefill.has_work


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_full_decode_stage_leaves_pages_with_the_sender(kind: str) -> None:
    """Two of three fit: 64 + 65 tokens take two pages at first and three in the end, so promises count, not use."""
    with stages(kind, decode_pages=7) as pair:
        for name in "abc":
            pair.prefill.submit(name, prompt_of(64), greedy(66))
        wait_until_offered(pair, *"abc")
        # Offers come through another thread: a decode stage that is quicker than it must not end the first answer.
        deadline = time.monotonic() + 30
        while pair.decode.num_pages_promised < 6 and time.monotonic() < deadline:
            pair.step_prefill()
            pair.step_decode()
            time.sleep(0.01)
        for _ in range(10):
            pair.step_prefill()
            pair.step_decode()
            assert pair.prefill_core.pages.manager.num_used >= 1
        assert pair.decode.num_pages_promised == 6
        assert pair.states("c") == ["offered"]
        pair.run()
        assert pair.tokens("c") == expected_tokens(prompt_of(64), 66)
        assert pair.states("c") == ["offered", "taken"]


def test_what_needs_no_decoding_ends_in_the_prefill_stage() -> None:
    with stages() as pair:
        ending = next(p for p in range(400) if expected_tokens(prompt_of(9, p), 1) == [EOS])
        pair.prefill.submit("one", prompt_of(9), greedy(1))
        pair.prefill.submit("end", prompt_of(9, ending), SamplingParams(max_tokens=9))
        pair.run()
        assert [(e.state, e.token_id, e.reason) for e in pair.prefill_events] == [
            ("ended", expected_tokens(prompt_of(9), 1)[0], "length"),
            ("ended", EOS, "stop"),
        ]
        assert pair.decode_events == []
        assert pair.prefill_core.pages.manager.num_used == 0


@pytest.mark.parametrize("change", [{"source": "00" * 32}, {"config": "00" * 32}])
def test_another_model_is_refused(change: dict[str, str]) -> None:
    pools, other = mla_pools(9), mla_pools(9)
    sender, receiver = local_transport(pools, NoopTracker())
    prefill = PrefillStage(pooled_core(pools), replace(MODEL, **change), sender)
    decode = DecodeStage(pooled_core(other), MODEL, receiver)
    events = run_once(prefill, decode)
    assert events[-1][:2] == ("a", "refused")
    assert next(iter(change)).split("_")[0] in events[-1][2]


def run_once(prefill: PrefillStage, decode: DecodeStage) -> list[tuple[str, str, str]]:
    prefill.submit("a", prompt_of(70), greedy(9))
    events = []
    for _ in range(10):
        events += [(event.request_id, event.state, event.reason) for event in prefill.step()]
        assert decode.step() == []
    assert not prefill.has_work
    assert not decode.has_work
    return events


def test_other_kinds_of_pages_are_refused() -> None:
    pools, other = mla_pools(9), gqa_pools(9)
    sender, receiver = local_transport(pools, NoopTracker())
    prefill = PrefillStage(pooled_core(pools), MODEL, sender)
    decode = DecodeStage(pooled_core(other), MODEL, receiver)
    assert "layer 0 of the prefill stage has mla+indexer pages, here gqa:2x64" in run_once(prefill, decode)[-1][2]


def test_a_request_that_could_never_end_is_refused_at_once() -> None:
    pools, other = mla_pools(9), mla_pools(9)
    sender, receiver = local_transport(pools, NoopTracker())
    prefill = PrefillStage(pooled_core(pools), MODEL, sender)
    decode = DecodeStage(pooled_core(other, max_tokens=78), MODEL, receiver)
    assert "longest sequence is 78" in run_once(prefill, decode)[-1][2]


def test_formats_that_cannot_be_handed_over_are_refused() -> None:
    for kv_format, is_sender in ((FP8_E4M3, True), (FP32, True), (FP32, False)):
        pools = mla_pools(4, kv_format)
        sender, receiver = local_transport(pools, NoopTracker())
        with refusal(UnsupportedError, kv_format.name):
            if is_sender:
                PrefillStage(pooled_core(pools), MODEL, sender)
            else:
                DecodeStage(pooled_core(pools), MODEL, receiver)


def test_names_are_unique_while_they_are_in_use() -> None:
    with stages() as pair:
        pair.prefill.submit("a", prompt_of(5), greedy(3))
        for name in ("a", "", "x" * 1000):
            with refusal(UsageError):
                pair.prefill.submit(name, prompt_of(5), greedy(3))
        pair.run()
        pair.prefill.submit("a", prompt_of(5), greedy(3))
        pair.run()
        assert pair.tokens("a") == expected_tokens(prompt_of(5), 3) * 2


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_abort_frees_pages_once_wherever_the_request_is(kind: str) -> None:
    with stages(kind, decode_pages=7) as pair:
        for name in "abcd":
            pair.prefill.submit(name, prompt_of(64), greedy(66))
        pair.step_prefill()
        pair.prefill_events += pair.prefill.abort("d")
        pair.prefill_events += pair.prefill.abort("nobody")
        assert pair.states("d") == ["ended"]
        wait_until_offered(pair, *"abc")
        wait_until_taken(pair, "a", "b")
        # c waits for room: its pages are the sender's until the receiver says that it will not read them.
        pair.prefill_events += pair.prefill.abort("c")
        used = pair.prefill_core.pages.manager.num_used
        assert used == 1
        # Heard before there is room for c, which a later cancel would find taken.
        end = time.monotonic() + 10
        while "refused" not in pair.states("c"):
            assert time.monotonic() < end
            pair.step_prefill()
            pair.decode._hear()
        assert pair.states("c") == ["offered", "refused"]
        pair.decode_events += pair.decode.abort("a")
        assert pair.decode.abort("a") == []
        pair.run()
        assert (pair.reason("a"), pair.reason("b")) == ("abort", "length")
        assert pair.tokens("b") == expected_tokens(prompt_of(64), 66)
        for core in (pair.prefill_core, pair.decode_core):
            assert core.pages.manager.num_used == 0


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_the_end_of_the_transport_frees_what_nobody_can_read(kind: str) -> None:
    with stages(kind, decode_pages=7) as pair:
        for name in "abc":
            pair.prefill.submit(name, prompt_of(64), greedy(66))
        wait_until_taken(pair, "a", "b")
        pair.decode.close()
        end = time.monotonic() + 10
        while "lost" not in pair.states("c"):
            assert time.monotonic() < end
            pair.step_prefill()
        assert pair.prefill_core.pages.manager.num_used == 0
        with pytest.raises(PeerError):
            pair.prefill.submit("d", prompt_of(5), greedy(5))
        pair.run()
        for name in "ab":
            assert pair.tokens(name) == expected_tokens(prompt_of(64), 66)
        assert pair.tokens("c") == []


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_sender_that_ends_takes_its_offers_along(kind: str) -> None:
    with stages(kind, decode_pages=7) as pair:
        for name in "abc":
            pair.prefill.submit(name, prompt_of(64), greedy(66))
        wait_until_taken(pair, "a", "b")
        pair.prefill_events += pair.prefill.close()
        assert pair.states("c")[-1] == "lost"
        assert pair.prefill_core.pages.manager.num_used == 0
        while pair.decode.has_work or not pair.decode.is_sender_gone:
            pair.step_decode()
        assert pair.tokens("b") == expected_tokens(prompt_of(64), 66)
        assert pair.decode_core.pages.manager.num_used == 0


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_offers_can_have_a_time_limit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(prefill_stage, "time", SimpleNamespace(monotonic=lambda: now))
    with stages(kind, decode_pages=7, offer_seconds=60.0) as pair:
        for name in "ab":
            pair.prefill.submit(name, prompt_of(200), greedy(100))
        wait_until_taken(pair, "a")
        wait_until_offered(pair, "b")
        # The decode stage hears, but has no room: it gives b back.
        now = 61.0
        end = time.monotonic() + 10
        while "refused" not in pair.states("b"):
            assert time.monotonic() < end
            pair.step_prefill()
            pair.step_decode()
        # Now it is deaf: the transport ends.
        pair.prefill.submit("c", prompt_of(70), greedy(5))
        wait_until_offered(pair, "c")
        now = 61.0 + 121.0
        pair.step_prefill()
        assert pair.states("c") == ["offered", "lost"]
        assert pair.prefill_core.pages.manager.num_used == 0


def test_a_request_that_loses_its_pages_to_a_quarantine_ends_alone() -> None:
    """Its prompt was computed with the prefill stage's weights: it is not computed again with others."""
    with stages(decode_pages=7) as pair:
        for name in "ab":
            pair.prefill.submit(name, prompt_of(64), greedy(66))
        wait_until_taken(pair, *"ab")
        # Both hold two pages of six and will need a third.
        manager = pair.decode_core.pages.manager
        free = [page for page in range(1, 7) if manager.num_holders(page) == 0]
        assert len(free) == 2
        assert all(manager.quarantine(page) for page in free)
        while pair.decode.has_work:
            pair.decode_events += pair.decode.step()
            pair.decode_core.pages.check()
        assert (pair.reason("a"), pair.reason("b")) == ("length", "capacity")
        assert pair.tokens("a") == expected_tokens(prompt_of(64), 66)
        assert pair.tokens("b") == expected_tokens(prompt_of(64), 66)[: len(pair.tokens("b"))]
        assert manager.num_used == 0


def test_offers_can_share_a_prefix() -> None:
    """Pages that the prefix index keeps are offered, and given back, as any others; the index keeps them."""
    pools, other = mla_pools(20), mla_pools(30)
    tracker = TaggedTracker(20, "cpu")
    sender, receiver = local_transport(pools, tracker)
    core = pooled_core(pools, tracker, prefix_namespace=b"test")
    prefill, decode = PrefillStage(core, MODEL, sender), DecodeStage(pooled_core(other), MODEL, receiver)
    pair = Stages(prefill, decode, core, decode._core)
    prompts = {"a": prompt_of(200), "b": prompt_of(200), "c": prompt_of(128) + [5] * 40}
    for name, prompt in prompts.items():
        prefill.submit(name, prompt, greedy(9))
        wait_until_offered(pair, name)
    # Three full pages of a and b, two of them c's too; one more page each.
    assert core.pages.manager.num_used == 3 + 3
    pair.run()
    for name, prompt in prompts.items():
        assert pair.tokens(name) == expected_tokens(prompt, 9)
    assert core.pages.manager.num_used == 3


class FirstTokenEnds:
    """A text watcher whose stop text is the very first token."""

    def push(self, token_id: int) -> tuple[str, bool]:
        return f"<{token_id}>", True

    def flush(self) -> str:
        return "never"


def test_a_stop_text_in_the_first_token_needs_no_pages() -> None:
    pools, other = mla_pools(9), mla_pools(9)
    sender, receiver = local_transport(pools, NoopTracker())
    prefill = PrefillStage(pooled_core(pools), MODEL, sender)
    decode = DecodeStage(pooled_core(other), MODEL, receiver, new_text=lambda _: FirstTokenEnds())
    prefill.submit("a", prompt_of(10), greedy(9))
    assert [event.state for event in prefill.step()] == ["offered"]
    first = expected_tokens(prompt_of(10), 1)[0]
    assert decode.step() == [DecodeEvent("a", first, f"<{first}>", "stop")]
    assert [event.state for event in prefill.step()] == ["taken"]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 200), st.integers(1, 70)),
        st.tuples(
            st.sampled_from(["prefill", "decode", "abort prefill", "abort decode"]), st.integers(0, 5), st.just(0)
        ),
    ),
    max_size=14,
)


@settings(max_examples=25, deadline=None)
@given(ACTIONS, st.sampled_from(["local", "local", "shared_memory", "socket"]), st.integers(6, 20))
def test_no_schedule_loses_a_page_or_changes_a_token(actions: list[Any], kind: str, decode_pages: int) -> None:
    with stages(kind, decode_pages=decode_pages, max_tokens=320) as pair:
        submitted: dict[str, tuple[int, int]] = {}
        for action, one, other in actions:
            if action == "submit":
                name = str(len(submitted))
                submitted[name] = (one, other)
                pair.prefill.submit(name, prompt_of(one), greedy(other))
            elif action == "abort prefill":
                pair.prefill_events += pair.prefill.abort(str(one))
            elif action == "abort decode":
                pair.decode_events += pair.decode.abort(str(one))
            else:
                for _ in range(one):
                    pair.step_prefill() if action == "prefill" else pair.step_decode()
        pair.run()
        for name, (length, max_tokens) in submitted.items():
            found, expected = pair.tokens(name), expected_tokens(prompt_of(length), max_tokens)
            assert found == expected[: len(found)]
            is_refused = -(-(length + max_tokens - 1) // 64) > decode_pages - 1
            if max_tokens > 1 and not is_refused and pair.reason(name) != "abort" and "taken" in pair.states(name):
                assert found == expected
            if is_refused:
                assert found == []
        for core in (pair.prefill_core, pair.decode_core):
            assert core.pages.manager.num_used == 0
