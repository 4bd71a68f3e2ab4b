"""Releases that the tests of a module share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import transformers

from differential.releases import Releases

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.fixture(autouse=True, scope="package")
def _offline() -> Iterator[None]:
    """No oracle asks the network; undone afterwards, for other folders' tests run in the same process."""
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    yield
    if before is None:
        del os.environ["HF_HUB_OFFLINE"]
    else:
        os.environ["HF_HUB_OFFLINE"] = before


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Releases:
    return Releases(tmp_path_factory.mktemp("releases"))
