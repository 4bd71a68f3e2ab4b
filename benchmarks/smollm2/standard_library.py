"""Python's standard library as text."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from memopt.errors import MissingFileError

# Packages of many files, in every Python; the example of the repository saw them in training.
LIBRARY_PACKAGES = ("asyncio", "concurrent", "ctypes", "email", "http", "json", "logging", "multiprocessing", "xml")
MIN_CHARACTERS = 500


def library_texts(*packages: str) -> list[str]:
    """The sources of packages, a file each, in the order of their names; MissingFileError for a package without any."""
    texts: list[str] = []
    for name in packages:
        spec = importlib.util.find_spec(name)
        folders = [] if spec is None else list(spec.submodule_search_locations or ())
        if not folders:
            raise MissingFileError(f"this Python has no package {name}", remedy="install the whole standard library")
        paths = sorted(Path(folders[0]).rglob("*.py"))
        read = [path.read_text(encoding="utf-8") for path in paths]
        texts += [text for text in read if len(text) >= MIN_CHARACTERS]
    return texts
