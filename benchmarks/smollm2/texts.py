"""English manuals and Python code out of source distributions: what to calibrate with, and what to measure on.

Documents are whole files in the order of their names. Nothing is extracted to disk: members are read from the archive.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from memopt.errors import MissingFileError

# A shorter file says little: an index page, an empty __init__.py.
MIN_CHARACTERS = 2_000
MAX_MEMBER_BYTES = 2**20
MAX_CHARACTERS = 24_000


@dataclass(frozen=True, slots=True)
class TextChoice:
    """Files of a source distribution: full matches of `pattern` on the path below its top folder."""

    name: str
    pattern: str


CALIBRATION_ENGLISH = TextChoice("calibration-english", r"docs/(topics|howto|intro|faq|ref)/.*\.txt")
CALIBRATION_CODE = TextChoice("calibration-code", r"django/(db|core|forms|http|template|utils|views)/.*\.py")
HELD_OUT_ENGLISH = TextChoice("held-out-english", r"docs/(userguide|getting-started|django|internals)/.*\.rst")
HELD_OUT_CODE = TextChoice("held-out-code", r"celery/.*\.py")


def read_documents(archive: Path, choice: TextChoice) -> list[str]:
    """The chosen files' texts, each cut at MAX_CHARACTERS so that none dominates; MissingFileError for none."""
    pattern = re.compile(choice.pattern)
    documents: dict[str, str] = {}
    with tarfile.open(archive) as opened:
        for member in opened:
            path = member.name.partition("/")[2]
            if not member.isfile() or member.size > MAX_MEMBER_BYTES or not pattern.fullmatch(path):
                continue
            stream = opened.extractfile(member)
            text = "" if stream is None else stream.read().decode("utf-8")
            if len(text) >= MIN_CHARACTERS:
                documents[path] = text[:MAX_CHARACTERS]
    if not documents:
        raise MissingFileError(f"no file matches {choice.pattern}", file=archive.name)
    return [documents[path] for path in sorted(documents)]


def interleaved(first: list[str], second: list[str]) -> list[str]:
    """Documents of both lists by turns, as many of the longer as of the shorter."""
    return [text for pair in zip(first, second, strict=False) for text in pair]


def write_jsonl(path: Path, documents: Iterable[str]) -> None:
    """One JSON object with `text` a line."""
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents), "utf-8")
