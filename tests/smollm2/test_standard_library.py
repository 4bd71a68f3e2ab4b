"""Texts of the standard library."""

from __future__ import annotations

import pytest

from benchmarks.smollm2.standard_library import MIN_CHARACTERS, library_texts
from memopt.errors import MissingFileError


def test_every_long_file_of_a_package_comes_once_in_order() -> None:
    texts = library_texts("json")
    assert [text for text in texts if "class JSONEncoder" in text and "class JSONDecoder" not in text]
    assert len(set(texts)) == len(texts)
    assert min(len(text) for text in texts) >= MIN_CHARACTERS
    assert library_texts("json", "http")[: len(texts)] == texts


def test_a_package_that_is_not_there_is_named() -> None:
    with pytest.raises(MissingFileError, match="no_such_package"):
        library_texts("no_such_package")
