"""`python -m pytest -m gate tests/kernels/compiled --write-budgets` writes budgets instead of checking them."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-budgets", action="store_true", help="write tests/kernels/compiled/budgets anew")
