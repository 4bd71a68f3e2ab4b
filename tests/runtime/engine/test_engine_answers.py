"""Who is told what: streams side by side, streams that nobody reads, steps that fail, ranks that are asked apart."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from signed_tiny_model import signed_tiny_model
from thread_ranks import ThreadRank, run_ranks

from memopt.errors import UsageError
from memopt.runtime.engine.engine import Engine
from memopt.runtime.engine.leader_commands import Abortion, Submission, exchange
from memopt.runtime.engine.sampling_params import SamplingParams

PROMPTS = ("def main(", "import os\n")
PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def shared_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    release = signed_tiny_model(tmp_path_factory.mktemp("answers"))
    with Engine(release.folder, key=release.key, dtype="float32", num_pages=40, max_requests=4) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """Every test leaves it without work and without pages."""
    yield shared_engine
    while shared_engine.has_work:
        shared_engine.step()
    shared_engine.core.pages.check()
    assert shared_engine.core.pages.manager.num_used == 0
    assert shared_engine.metrics().performance.num_running == 0
    assert not shared_engine._answers


def test_streams_side_by_side_lose_no_text(engine: Engine) -> None:
    """A step for one stream computes the others' tokens, too."""
    alone = [completion.text for completion in engine.generate(PROMPTS, PARAMS)]
    streams = [engine.stream(prompt, PARAMS) for prompt in PROMPTS]
    texts = ["", ""]
    while True:
        pieces = [next(stream, None) for stream in streams]
        if pieces == [None, None]:
            break
        texts = [text + (piece or "") for text, piece in zip(texts, pieces, strict=True)]
    assert texts == alone
    one, two = (engine.stream(prompt, PARAMS) for prompt in PROMPTS)
    assert ["".join(one), "".join(two)] == alone
    assert engine.step() == []


def test_step_tells_nothing_of_a_stream_and_takes_nothing_from_it(engine: Engine) -> None:
    (expected,) = engine.generate(PROMPTS[:1], PARAMS)
    stream = engine.stream(PROMPTS[0], PARAMS)
    own = engine.submit(PROMPTS[1], PARAMS)
    told = []
    while engine.has_work:
        told += engine.step()
    assert {event.request_id for event in told} == {own}
    assert "".join(stream) == expected.text


@pytest.mark.parametrize("num_pieces", [0, 1])
@pytest.mark.parametrize("is_closed", [False, True])
def test_a_stream_that_is_not_read_to_its_end_is_aborted(engine: Engine, num_pieces: int, is_closed: bool) -> None:
    num_aborts = engine.metrics().performance.num_finished.get("abort", 0)
    stream = engine.stream(PROMPTS[0], SamplingParams(max_tokens=1000, ignore_eos=True))
    for _ in range(num_pieces):
        next(stream)
    if is_closed:
        stream.close()  # type: ignore[attr-defined]
    del stream
    assert engine.has_work
    assert engine.step() == []
    assert not engine.has_work
    assert engine.metrics().performance.num_finished["abort"] == num_aborts + 1


def test_an_abort_is_told_although_the_step_after_it_fails(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (engine.submit(prompt, PARAMS) for prompt in PROMPTS)
    engine.step()
    engine.abort(first)
    runner = engine.core._runner

    def fails(*_: object) -> None:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "run", fails)
        with pytest.raises(RuntimeError, match="the device is gone"):
            engine.step()
    events = engine.step()
    assert [(event.request_id, event.finish_reason) for event in events] == [(first, "abort"), (second, None)]


def test_the_time_to_the_first_token_begins_with_submit(engine: Engine) -> None:
    before = engine.metrics().performance
    engine.submit(PROMPTS[0], SamplingParams(max_tokens=1))
    time.sleep(0.2)
    engine.step()
    after = engine.metrics().performance
    for name in ("time_to_first_token", "queue_time"):
        old, new = getattr(before, name), getattr(after, name)
        seconds = new.mean_seconds * new.num_recorded - old.mean_seconds * old.num_recorded
        assert 0.19 < seconds < 10, name


def test_prompts_of_any_integer_type(engine: Engine) -> None:
    ids = [5, 6, 7]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    answers = engine.generate([ids, np.array(ids), tuple(np.array(ids, dtype=np.int32))], params)  # type: ignore[list-item]
    assert len({answer.token_ids for answer in answers}) == 1


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (b"abc", "of the type bytes"),
        ({"role": "user"}, "the type dict"),
        (7, "the type int"),
        (["a"], "str values"),
    ],
)
def test_what_is_no_prompt(engine: Engine, prompt: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        engine.submit(prompt)  # type: ignore[arg-type]


def test_one_prompt_is_no_list_of_prompts(engine: Engine) -> None:
    """Else each of its characters would be answered."""
    with pytest.raises(UsageError, match="prompts is one str") as caught:
        engine.generate("def main(")
    assert "list" in str(caught.value.remedy)


def test_ranks_that_are_asked_for_other_requests_are_refused() -> None:
    """Numbers would stand for other prompts, and one request's answer be taken for another's."""
    one, two = (Submission((token,), SamplingParams(stop=["x"]), "") for token in (1, 2))  # type: ignore[arg-type]

    def asked(firsts: list[Submission | Abortion], others: list[Submission | Abortion]) -> list[object]:
        def work(communicator: ThreadRank) -> object:
            try:
                return exchange(others if communicator.rank else firsts, communicator)
            except UsageError as problem:
                return str(problem)

        return run_ranks(2, work)

    assert asked([one, two], [one, two]) == [[one, two]] * 2
    assert asked([one, Abortion(7)], [one]) == [[one, Abortion(7)]] * 2
    assert asked([one], [Abortion(7), one]) == [[one]] * 2
    for firsts, others in (([one, two], [two, one]), ([], [one]), ([one], [])):
        first, other = asked([*firsts], [*others])
        assert first == firsts
        assert f"rank 1 was asked for {len(others)} new requests, which are not the {len(firsts)}" in str(other)
