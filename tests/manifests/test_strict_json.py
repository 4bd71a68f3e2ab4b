"""JSON from outside: one object, each key once, numbers only, and never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal, within_seconds

from memopt.errors import ConfigError, IndexFileError, LayoutError, MissingFileError
from memopt.manifests.strict_json import parse_json_object, read_capped

FILE = "config.json"
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(table=st.dictionaries(st.text(max_size=8), VALUES, max_size=4), is_ascii=st.booleans())
@settings(max_examples=100, deadline=None)
def test_what_json_writes_is_read_back(table: dict[str, Any], is_ascii: bool) -> None:
    raw = json.dumps(table, ensure_ascii=is_ascii).encode()
    assert parse_json_object(raw, FILE, ConfigError) == table


@given(raw=st.binary(max_size=40) | st.text('{}[]":,0123eE.-truefalsn\\ud8 ', max_size=40).map(str.encode))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_an_object_or_the_callers_error(raw: bytes) -> None:
    try:
        value = parse_json_object(raw, FILE, ConfigError)
    except ConfigError as problem:
        is_named = str(problem).startswith(f"{FILE}: ")
    else:
        is_named = isinstance(value, dict)
    assert is_named


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (b"", "not strict JSON"),
        (b"[]", "a JSON object is needed, this is a list"),
        (b"3", "this is a int"),
        (b"null", "this is a NoneType"),
        (b'{"a": 1, "a": 1}', "'a' appears twice"),
        (b'{"x": {"b": 1, "c": 2, "b": 3}}', "'b' appears twice"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": [Infinity]}', "Infinity is not JSON"),
        (b'{"a": "\xe9"}', "utf-8"),
        (b"\xef\xbb\xbf{}", "not strict JSON"),
        (b'{"a": 1}x', "Extra data"),
        (b"{'a': 1}", "not strict JSON"),
        (b'{"a": "\\udfff"}', "unpaired surrogate"),
        (b'{"\\uD83D": 1}', "unpaired surrogate"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not strict JSON"),
        (b"[" * 200_000, "nesting is too deep"),
    ],
)
def test_what_is_not_strict_is_refused(raw: bytes, word: str) -> None:
    with within_seconds(10), refusal(IndexFileError, FILE, word):
        parse_json_object(raw, FILE, IndexFileError)


def test_a_pair_of_surrogates_is_one_character() -> None:
    assert parse_json_object(b'{"\\ud83d\\ude00": 1}', FILE, ConfigError) == {"😀": 1}


def test_a_file_of_the_cap_is_read_and_one_byte_more_is_not(tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_bytes(b"x" * 1000)
    assert read_capped(path, 1000, ConfigError) == b"x" * 1000
    path.write_bytes(b"x" * 1001)
    with refusal(ConfigError, FILE, "1,001 bytes, at most 1,000 are read"):
        read_capped(path, 1000, ConfigError)


def test_a_sparse_giant_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / FILE
    with path.open("wb") as stream:
        stream.truncate(2**40)
    with within_seconds(5), refusal(ConfigError, FILE, f"{2**40:,}"):
        read_capped(path, 2**20, ConfigError)


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with refusal(MissingFileError, FILE, str(tmp_path)):
        read_capped(tmp_path / FILE, 10, ConfigError)
    with refusal(LayoutError, str(tmp_path), "not a regular file"):
        read_capped(tmp_path, 10, ConfigError)
