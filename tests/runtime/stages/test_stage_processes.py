"""Two stages in two processes: the same tokens, and whatever one of them suffers, the other gives its pages back."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from page_reading_model import expected_tokens
from refusals import within_seconds
from stage_pairs import greedy, prompt_of
from stage_processes import (
    child,
    new_decode,
    new_prefill,
    pipe,
    pull_and_stop,
    run_decode,
    run_prefill,
)

from memopt.runtime.stages import page_transport_shared_memory, page_transport_socket
from memopt.runtime.stages.decode_stage import DecodeStage

KINDS = ("socket", "shared_memory")
REQUESTS = [("a", 10, 40), ("b", 64, 3), ("c", 300, 20), ("d", 65, 30), ("e", 200, 9)]


@pytest.fixture(autouse=True)
def _no_test_waits_for_ever() -> Iterator[None]:
    with within_seconds(90):
        yield


def run_until_alone(stage: DecodeStage) -> dict[str, list[int]]:
    """Step until the sender is gone and all is done: tokens by request."""
    tokens: dict[str, list[int]] = {}
    while stage.has_work or not stage.is_sender_gone:
        for event in stage.step():
            if event.token_id is not None:
                tokens.setdefault(event.request_id, []).append(event.token_id)
        stage._core.pages.check()
        time.sleep(0.001)
    return tokens


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefill_process_feeds_a_decode_process(kind: str) -> None:
    one, other = socket.socketpair()
    reader, writer = pipe()
    # Pages for one or two requests at a time: the others wait at the sender.
    with (
        child(run_prefill, kind, one, 30, REQUESTS) as prefill,
        child(run_decode, kind, other, 8, "fp8_ds_mla", writer),
    ):
        one.close()
        other.close()
        writer.close()
        tokens: dict[str, list[int]] = {}
        try:
            while True:
                name, token = reader.recv()
                tokens.setdefault(name, []).append(token)
        except EOFError:
            pass
        prefill.join()
        assert prefill.exitcode == 0
    assert tokens == {name: expected_tokens(prompt_of(length), count) for name, length, count in REQUESTS}


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefill_process_that_is_killed_takes_only_what_was_not_taken(kind: str) -> None:
    one, other = socket.socketpair()
    with child(run_prefill, kind, one, 60, [*REQUESTS, ("late", 500, 4)]) as prefill:
        one.close()
        decode = new_decode(kind, other, 8, "bf16")
        names: set[str] = set()
        tokens: dict[str, list[int]] = {}
        while len(names) < 2:
            for event in decode.step():
                names.add(event.request_id)
                tokens.setdefault(event.request_id, []).append(event.token_id or 0)
        prefill.kill()
        prefill.join()
        for name, more in run_until_alone(decode).items():
            tokens.setdefault(name, []).extend(more)
    for name, length, count in REQUESTS:
        if name in tokens:
            assert tokens[name] == expected_tokens(prompt_of(length), count)
    assert "late" not in tokens
    assert decode._core.pages.manager.num_used == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefill_process_killed_while_its_pages_are_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = socket.socketpair()
    with child(run_prefill, kind, one, 60, [("a", 2000, 5)]) as prefill:
        one.close()
        decode = new_decode(kind, other, 60, "bf16")
        name = "convert_pools" if kind == "shared_memory" else "convert_layer"
        module: Any = page_transport_shared_memory if kind == "shared_memory" else page_transport_socket
        original = getattr(module, name)
        calls = []

        def convert_and_kill(*arguments: Any) -> None:
            if not calls:
                os.kill(prefill.pid, signal.SIGKILL)
                prefill.join()
            calls.append(1)
            original(*arguments)

        monkeypatch.setattr(module, name, convert_and_kill)
        assert run_until_alone(decode) == {}
        assert calls == [1]
        assert decode._core.pages.manager.num_used == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_decode_process_killed_while_it_reads(kind: str) -> None:
    one, other = socket.socketpair()
    reader, writer = pipe()
    with child(pull_and_stop, kind, other, writer) as decode:
        other.close()
        prefill = new_prefill(kind, one, 60)
        prefill.submit("a", prompt_of(2000), greedy(5))
        prefill.submit("b", prompt_of(100), greedy(5))
        states = []
        while len(states) < 2:
            states += [event.state for event in prefill.step()]
        assert reader.recv() is True
        for _ in range(3):
            states += [event.state for event in prefill.step()]
            assert prefill._core.pages.manager.num_used == 32 + 2
        decode.kill()
        decode.join()
        while prefill.has_work:
            states += [event.state for event in prefill.step()]
        assert states == ["offered", "offered", "lost", "lost"]
        prefill._core.pages.check()
        assert prefill._core.pages.manager.num_used == 0
