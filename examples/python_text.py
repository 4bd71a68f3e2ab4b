"""Packages of Python's standard library as calibration text: python python_text.py asyncio email > text.jsonl"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path


def documents(package: str) -> Iterator[str]:
    """The source of every file of `package` that is not empty, in the order of their paths."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        sys.exit(f"this Python has no package {package} with source files")
    for path in sorted(Path(found.origin).parent.rglob("*.py")):
        if text := path.read_text(encoding="utf-8"):
            yield text


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for text in documents(name):
            sys.stdout.write(json.dumps({"text": text}) + "\n")
