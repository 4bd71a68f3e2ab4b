"""Streamed text: whole characters only, and joined it is the text of all tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from memopt.runtime.text.answer_text import AnswerText
from memopt.runtime.text.text_stream import TextStream
from memopt.runtime.text.tokenizer import TextTokenizer

TINY = Tokenizer.from_file(str(Path(__file__).parents[3] / "examples" / "tiny-glm5-fp8" / "tokenizer.json"))
TOKENIZER = TextTokenizer(TINY, (0,))
# 3 control tokens, 256 bytes, merges, and ids that only the embedding has.
TOKEN_IDS = st.lists(st.integers(0, 2060) | st.integers(3, 258), max_size=30)


def pieces_of(token_ids: list[int]) -> list[str]:
    stream = TextStream(TOKENIZER.bytes_of)
    return [*map(stream.push, token_ids), stream.flush()]


@given(token_ids=TOKEN_IDS)
@settings(max_examples=300, deadline=None)
def test_pieces_joined_are_the_text_that_the_library_decodes(token_ids: list[int]) -> None:
    text = TINY.decode(token_ids, skip_special_tokens=True)
    assert "".join(pieces_of(token_ids)) == text
    assert TOKENIZER.decode(token_ids) == text


@given(text=st.text(max_size=20))
@settings(max_examples=200, deadline=None)
def test_no_piece_of_a_real_text_holds_half_a_character(text: str) -> None:
    pieces = pieces_of(TINY.encode(text).ids)
    assert "".join(pieces) == text
    assert "�" in text or all("�" not in piece for piece in pieces)


def test_a_character_of_four_bytes_comes_with_its_last_token() -> None:
    token_ids = TINY.encode("a🌍b").ids
    assert len(token_ids) == 6
    assert pieces_of(token_ids) == ["a", "", "", "", "🌍", "b", ""]


def test_the_space_before_a_word_is_kept() -> None:
    assert pieces_of(TINY.encode(" def f").ids)[:2] == [" def", " f"]


@pytest.mark.parametrize(
    ("raw", "pieces"),
    [
        # The start of a character that the next byte cannot go on, then one that nothing follows.
        (b"\xe6a\xf0\x9f", ["", "�a", "", "", "�"]),
        (b"\xff", ["�", ""]),
        (b"\xc3\xa9", ["", "é", ""]),
    ],
)
def test_bytes_that_are_no_text(raw: bytes, pieces: list[str]) -> None:
    stream = TextStream(lambda token_id: raw[token_id : token_id + 1])
    assert [*map(stream.push, range(len(raw))), stream.flush()] == pieces


def test_control_tokens_and_unknown_ids_have_no_text() -> None:
    assert pieces_of([0, 1, 2, 5000]) == ["", "", "", "", ""]
    assert TOKENIZER.decode([0, 1, 2, 5000]) == ""


def test_an_answer_is_cut_at_a_stop_text_that_ends_within_a_token() -> None:
    answer = AnswerText(TOKENIZER.bytes_of, ["r)"])
    token_ids = TINY.encode("for (var):\n").ids
    texts = [answer.push(token_id) for token_id in token_ids]
    assert "".join(text for text, _ in texts) == "for (va"
    assert [stopped for _, stopped in texts].index(True) < len(token_ids)
    assert answer.flush() == ""


def test_what_was_held_back_comes_at_the_end() -> None:
    answer = AnswerText(TOKENIZER.bytes_of, ["):x"])
    pieces = [answer.push(token_id)[0] for token_id in TINY.encode("f(x):").ids]
    assert "".join(pieces) == "f(x"
    assert answer.flush() == "):"
