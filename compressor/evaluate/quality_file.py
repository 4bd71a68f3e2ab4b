"""quality.json: a release's measured quality, signed with it. Figures, digests and counts; never text or token ids.

Canonical: keys sorted, no blanks, figures as `1.234567e-03`, one line feed at the end. The parser accepts exactly what
the writer writes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from typing import Any

from memopt.compressor.evaluate.quality import Quality
from memopt.compressor.evaluate.quality_bounds import impossible_figure
from memopt.errors import QualityFileError
from memopt.manifests.strict_json import parse_json_object

QUALITY_NAME = "quality.json"
QUALITY_FORMAT = "memopt.quality/1"
MAX_QUALITY_SIZE_BYTES = 2**22
_LARGEST = 9.9e98


def render_quality(quality: Quality) -> bytes:
    """quality.json's bytes: the same for the same figures."""
    table = {"format": QUALITY_FORMAT, **_table(quality)}
    return (_json(table) + "\n").encode()


def parse_quality(raw: bytes, file: str = QUALITY_NAME) -> Quality:
    """`raw` back as a Quality.

    QualityFileError for unknown or missing keys, wrong types, any other spelling, and figures that nobody measured.
    """
    if len(raw) > MAX_QUALITY_SIZE_BYTES:
        raise QualityFileError(f"{len(raw):,} bytes, at most {MAX_QUALITY_SIZE_BYTES:,} are read", file=file)
    table = parse_json_object(raw, file, QualityFileError)
    if table.pop("format", None) != QUALITY_FORMAT:
        raise QualityFileError(f"format is not {QUALITY_FORMAT}", file=file, remedy="read it with another memopt")
    quality = typing.cast(Quality, _value(Quality, table, "quality", file))
    if render_quality(quality) != raw:
        raise QualityFileError("is not spelled canonically", file=file, remedy="fetch it again")
    fault = impossible_figure(quality)
    if fault is not None:
        raise QualityFileError(f"{fault}: no measurement gives that", file=file, remedy="evaluate again")
    return quality


def figure_text(value: float) -> str:
    """A JSON number with six decimals and an exponent; infinity and NaN become 9.9e98, which no figure reaches."""
    if not math.isfinite(value) or abs(value) > _LARGEST:
        value = _LARGEST
    return f"{0.0 if abs(value) < 1 / _LARGEST else value:.6e}"


def _table(value: Any) -> Any:
    """Dataclasses as tables, tuples as lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {entry.name: _table(getattr(value, entry.name)) for entry in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_table(item) for item in value]
    return value


def _json(value: Any) -> str:
    """Canonical JSON text."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{_json(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_json(item) for item in value) + "]"
    if isinstance(value, float):
        return figure_text(value)
    return json.dumps(value, ensure_ascii=False)


def _value(kind: Any, value: Any, place: str, file: str) -> Any:
    """`value` of parsed JSON as `kind`: a dataclass, a tuple of one kind or of several, str, int, float or Literal."""
    if dataclasses.is_dataclass(kind):
        return _dataclass(typing.cast(type, kind), value, place, file)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and isinstance(value, list):
        if arguments[-1] is not Ellipsis and len(arguments) != len(value):
            raise QualityFileError(f"{place} has {len(value)} entries", file=file)
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        pairs = zip(kinds, value, strict=True)
        return tuple(_value(one, item, f"{place}[{index}]", file) for index, (one, item) in enumerate(pairs))
    if origin is typing.Literal and value in arguments:
        return value
    if origin is types.UnionType:
        return None if value is None else _value(arguments[0], value, place, file)
    # bool is an int to isinstance; no field of a Quality is one.
    if isinstance(kind, type) and type(value) is kind:
        return value
    text = type(value).__name__ if isinstance(value, (dict, list)) else repr(value)[:80]
    raise QualityFileError(f"{place} is {text}", file=file)


def _dataclass(kind: type, value: Any, place: str, file: str) -> Any:
    """A dataclass from a table that has its fields, all of them and no other."""
    hints = typing.get_type_hints(kind)
    names = {entry.name for entry in dataclasses.fields(kind)}
    if not isinstance(value, dict) or set(value) != names:
        odd = sorted(names ^ set(value)) if isinstance(value, dict) else ["not a table"]
        raise QualityFileError(f"{place}: {odd[0]} is missing or unknown", file=file)
    return kind(**{name: _value(hints[name], value[name], f"{place}.{name}", file) for name in sorted(names)})
