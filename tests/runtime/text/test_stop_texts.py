"""Stop texts: found across pieces, nothing of them handed out, nothing else lost."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memopt.runtime.text.stop_texts import StopTexts

WORDS = st.text("ab\n", max_size=12)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool, list[str]]:
    """(the answer, whether it was stopped, what each piece brought)."""
    watcher = StopTexts(stops)
    brought = [watcher.push(piece) for piece in pieces]
    return "".join(brought) + watcher.flush(), watcher.is_stopped, brought


def expected(stops: list[str], text: str) -> tuple[str, bool]:
    """Character by character: the first end of a stop text; of several that end there, the longest."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))], True
    return text, False


@given(stops=STOPS, pieces=st.lists(WORDS, max_size=6))
@example(stops=["abb", "b"], pieces=["a", "b", "b"])
@settings(max_examples=500, deadline=None)
def test_any_cut_into_pieces_gives_the_same_answer(stops: list[str], pieces: list[str]) -> None:
    answer, is_stopped, _ = run(stops, pieces)
    assert (answer, is_stopped) == expected(stops, "".join(pieces))


@given(stops=STOPS, pieces=st.lists(WORDS, max_size=6))
@settings(max_examples=300, deadline=None)
def test_only_what_may_be_a_stop_text_waits(stops: list[str], pieces: list[str]) -> None:
    watcher = StopTexts(stops)
    given_out, seen = "", ""
    for piece in pieces:
        given_out += watcher.push(piece)
        seen += piece
        if watcher.is_stopped:
            break
        waiting = seen[len(given_out) :]
        assert seen.startswith(given_out)
        assert waiting == "" or any(stop.startswith(waiting) and stop != waiting for stop in stops)


@pytest.mark.parametrize(
    ("stops", "pieces", "brought"),
    [
        (["\n\n"], ["a\n", "b\n", "\nc"], ["a", "\nb", ""]),
        (["END"], ["xE", "N", "D"], ["x", "", ""]),
        (["END"], ["xE", "N", "E"], ["x", "", "EN"]),
        (["b"], ["abc", "d"], ["a", ""]),
        ([], ["a", "b"], ["a", "b"]),
    ],
)
def test_pieces(stops: list[str], pieces: list[str], brought: list[str]) -> None:
    assert run(stops, pieces)[2] == brought


def test_of_two_stop_texts_the_one_that_is_complete_first_counts() -> None:
    assert run(["abcd", "bc"], ["abcd"])[:2] == ("a", True)
    assert run(["abc", "c"], ["xabc"])[:2] == ("x", True)
