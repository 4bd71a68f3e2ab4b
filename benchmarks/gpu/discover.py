"""Finds the cases: every `cases_*.py` beside this file. What cannot be imported is a case that fails, not a gap."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.case import GpuCase

FOLDER = Path(__file__).parent
PACKAGE = "benchmarks.gpu"


@dataclass(frozen=True)
class BrokenModule:
    """A file of cases that could not be imported or listed."""

    name: str
    reason: str


def find_cases(folder: Path = FOLDER, package: str = PACKAGE) -> Iterator[GpuCase | BrokenModule]:
    """The cases of every `cases_*.py` of `folder`, files by name, cases in their order."""
    for path in sorted(folder.glob("cases_*.py")):
        try:
            yield from list(importlib.import_module(f"{package}.{path.stem}").cases())
        except Exception as error:  # noqa: BLE001 - one broken file must not stop the others
            yield BrokenModule(path.stem, one_line(error))


def one_line(error: BaseException) -> str:
    """An error's kind and text as one line of at most 200 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:200]
