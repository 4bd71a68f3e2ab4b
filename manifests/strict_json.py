"""JSON from outside: size cap first, duplicate keys and non-numbers refused, errors without tracebacks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from memopt.errors import MalformedError, MemoptIOError
from memopt.manifests.open_file import open_regular, read_exactly


class _StrictJsonError(ValueError):
    pass


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _StrictJsonError(f"key {key!r} appears twice")
            seen.add(key)
    return result


# Escapes of half a character. As a name it can be neither printed nor written to a file.
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def _refuse_half_characters(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _StrictJsonError("a string holds an unpaired surrogate") from None


def _refuse_constant(text: str) -> Any:
    raise _StrictJsonError(f"{text} is not JSON")


def parse_json_object(raw: bytes, file: str, error: type[MalformedError]) -> dict[str, Any]:
    """Parse `raw` as one UTF-8 JSON object; raise `error` naming `file` for anything else."""
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_pairs, parse_constant=_refuse_constant)
        if _SURROGATE_ESCAPE.search(raw):
            _refuse_half_characters(value)
    except (UnicodeDecodeError, ValueError, RecursionError) as problem:
        reason = "nesting is too deep" if isinstance(problem, RecursionError) else str(problem)
        raise error(f"not strict JSON: {reason}", file=file, remedy="fetch the file again") from None
    if not isinstance(value, dict):
        raise error(f"a JSON object is needed, this is a {type(value).__name__}", file=file)
    return value


def read_capped(path: Path, max_size_bytes: int, error: type[MalformedError]) -> bytes:
    """Read a small file whole; `error` if it is larger than the cap, else as `open_regular` raises."""
    with open_regular(path) as (descriptor, status):
        if status.st_size > max_size_bytes:
            raise error(f"{status.st_size:,} bytes, at most {max_size_bytes:,} are read", file=path.name)
        try:
            raw = read_exactly(descriptor, max_size_bytes + 1, 0)
        except OSError as problem:
            raise MemoptIOError(f"cannot read: {problem.strerror}", file=str(path)) from None
    if len(raw) > max_size_bytes:
        raise error(f"grew past {max_size_bytes:,} bytes while it was read", file=path.name)
    return raw
