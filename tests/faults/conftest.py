"""Fixtures of the fault tests: one small source, and what an uninterrupted run makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.small_source import compress, make_small_source
from faults.trees import tree


@pytest.fixture(scope="session")
def shared_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small source that no test may change."""
    return make_small_source(tmp_path_factory.mktemp("shared") / "source")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The same source, for a test to spoil."""
    return make_small_source(tmp_path / "source")


@pytest.fixture(scope="session")
def reference(shared_source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The tree that an uninterrupted run of `compress` makes of the small source."""
    out = tmp_path_factory.mktemp("reference") / "out"
    compress(shared_source, out)
    return tree(out)
