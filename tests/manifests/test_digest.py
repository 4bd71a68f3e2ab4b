"""Digests in hex: one, and many by one match."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopt.manifests.digest import are_hex_digests, is_hex_digest

A, B = "a" * 64, "0123456789abcdef" * 4
HEX = st.text("0123456789abcdef", min_size=64, max_size=64)
NEARLY = st.text("0123456789abcdef ", min_size=62, max_size=66) | st.sampled_from(["", " ", A + " " + B, A.upper()])


@given(st.lists(HEX | NEARLY, min_size=1, max_size=5))
def test_many_are_digests_if_each_is(texts: list[str]) -> None:
    assert are_hex_digests(list(texts)) == all(is_hex_digest(text) for text in texts)


@pytest.mark.parametrize(
    "texts", [[], [1], [None, A], [[A]], [A + " " + B, ""], ["", A + " " + B], [A + "\n"], [A + " "], [A[:-1], B + "a"]]
)
def test_what_only_looks_like_digests_when_it_is_joined(texts: list[Any]) -> None:
    assert not are_hex_digests(texts)
    assert are_hex_digests([A, B, A])
