"""Requests that a hand-over has no form for, and events that must not get lost on the way."""

from __future__ import annotations

import time

import pytest
from page_reading_model import expected_tokens
from page_transports import TRANSPORTS
from refusals import refusal
from stage_pairs import greedy, prompt_of, stages, wait_until_offered

from memopt.errors import UsageError
from memopt.runtime.engine.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("name", "tenant", "params"),
    [
        ("a\ud800", "", greedy(3)),
        ("a", "t\udfff", greedy(3)),
        ("a", "t" * 257, greedy(3)),
        ("a", "", SamplingParams(stop=("x" * 5000,))),
        ("a", "", SamplingParams(stop=tuple(map(str, range(65))))),
        ("a", "", SamplingParams(stop=("\ud800",))),
        ("a", "", SamplingParams(max_tokens=2**63)),
    ],
)
def test_what_a_receiver_would_not_read_is_refused_at_once(name: str, tenant: str, params: SamplingParams) -> None:
    """Sent, it would break the format: the connection would end, and every other request's offer with it."""
    with stages() as pair:
        with refusal(UsageError, "handed over"):
            pair.prefill.submit(name, prompt_of(5), params, tenant=tenant)
        assert not pair.prefill.has_work


def test_stop_texts_need_a_stage_that_makes_text() -> None:
    with stages() as pair:
        pair.prefill.submit("a", prompt_of(5), SamplingParams(max_tokens=9, stop=("x",)))
        pair.run()
        assert pair.states("a") == ["offered", "refused"]
        assert "stop texts" in pair.prefill_events[-1].reason


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_an_answer_that_came_before_the_end_counts(kind: str) -> None:
    """Taken is taken: told as lost, the request would run twice."""
    with stages(kind) as pair:
        pair.prefill.submit("a", prompt_of(64), greedy(9))
        wait_until_offered(pair, "a")
        end = time.monotonic() + 10
        while not pair.tokens("a"):
            assert time.monotonic() < end
            pair.step_decode()
        if kind != "local":
            # Its thread has the answer, which nobody asked for yet.
            while pair.prefill._sender._offers._answers.empty():
                assert time.monotonic() < end
                time.sleep(0.001)
        pair.prefill_events += pair.prefill.close()
        assert pair.states("a") == ["offered", "taken"]
        assert pair.prefill_core.pages.manager.num_used == 0
        assert pair.prefill.close() == []


def test_a_step_that_fails_loses_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with stages() as pair:
        pair.prefill.submit("a", prompt_of(64), greedy(9))
        wait_until_offered(pair, "a")

        def fail() -> None:
            raise RuntimeError("out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(pair.decode_core, "step", fail)
            with pytest.raises(RuntimeError):
                pair.decode.step()
        pair.run()
        assert pair.tokens("a") == expected_tokens(prompt_of(64), 9)
