"""The fuzzed parsers on every run of the tests: changed sound inputs, any bytes. `make fuzz` goes on longer."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.parsers import PARSERS, try_parser

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=20), children, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize("name", PARSERS)
def test_the_seeds_are_read(name: str) -> None:
    accepted = [try_parser(name, seed) for seed in PARSERS[name].seeds]
    assert all(accepted)


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes(name: str, raw: bytes) -> None:
    assert not try_parser(name, raw)


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_changed_bytes(name: str, data: st.DataObject) -> None:
    raw = bytearray(data.draw(st.sampled_from(PARSERS[name].seeds)))
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(raw)))
        end = data.draw(st.integers(start, min(start + 12, len(raw))))
        raw[start:end] = data.draw(st.binary(max_size=12))
    try_parser(name, bytes(raw))


@pytest.mark.parametrize("name", [name for name in PARSERS if name not in {"chunks", "header", "ids"}])
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_changed_values(name: str, data: st.DataObject) -> None:
    """One value somewhere in a sound document is replaced by any other."""
    document = json.loads(data.draw(st.sampled_from(PARSERS[name].seeds)))
    place = document
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            place[key] = data.draw(_JSON)
            break
        place = place[key]
    try_parser(name, json.dumps(document).encode())
