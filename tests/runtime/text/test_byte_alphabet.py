"""The characters that byte-level vocabularies write bytes with."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, pre_tokenizers

from memopt.runtime.text.byte_alphabet import BYTE_CHARACTERS, token_bytes, token_text


def test_the_alphabet_is_the_one_of_tokenizers() -> None:
    assert len(set(BYTE_CHARACTERS)) == 256
    assert set(BYTE_CHARACTERS) == set(pre_tokenizers.ByteLevel.alphabet())


@pytest.mark.parametrize(("raw", "text"), [(b" def", "Ġdef"), (b"\n", "Ċ"), (b"\xc3\xa9", "Ã©"), (b"\x00\xad", "ĀŃ")])
def test_known_spellings(raw: bytes, text: str) -> None:
    assert token_text(raw) == text
    assert token_bytes(text) == raw


@given(raw=st.binary(max_size=12))
@settings(max_examples=100, deadline=None)
def test_any_bytes_come_back(raw: bytes) -> None:
    assert token_bytes(token_text(raw)) == raw


@given(text=st.text(max_size=8))
@settings(max_examples=200, deadline=None)
def test_a_tokens_bytes_are_those_of_the_librarys_decoder(text: str) -> None:
    assert token_bytes(text).decode("utf-8", "replace") == decoders.ByteLevel().decode([text])
