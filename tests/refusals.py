"""How tests expect a refusal: the exact class, its code, and a message that names the place."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from memopt.errors import MemoptError


def assert_refusal(problem: MemoptError, error: type[MemoptError], *words: str) -> None:
    """`problem` is of class `error` itself and its text, one line, has all of `words`."""
    text = str(problem)
    assert type(problem) is error, f"{type(problem).__name__}: {text}"
    assert problem.code == error.code
    for word in words:
        assert word in text, f"{word!r} is not in: {text}"
    assert "Traceback" not in text
    assert len(text) < 2000, "a message is one line, whatever the input"


@contextmanager
def refusal(error: type[MemoptError], *words: str) -> Iterator[None]:
    """The block must raise `error` (no subclass of it) with all of `words` in its text."""
    with pytest.raises(MemoptError) as caught:
        yield
    assert_refusal(caught.value, error, *words)


@contextmanager
def within_seconds(seconds: int) -> Iterator[None]:
    """Fail, instead of hanging the whole test run, when the block waits for something that never comes."""

    def on_alarm(_number: int, _frame: object) -> None:
        raise TimeoutError(f"still waiting after {seconds} s")

    previous = signal.signal(signal.SIGALRM, on_alarm)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
