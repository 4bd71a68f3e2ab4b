"""What a finished unit left in OUT/.memopt/units: ledger lines, error figures, and what its files looked like then."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from typing import Any

from memopt.compressor.ledger import ErrorFigures

ErrorsByRole = dict[str, ErrorFigures]


@dataclass(frozen=True)
class PublishedStamp:
    """A published file: size in bytes, time of its last change (ctime) in ns, inode. Nobody can set ctime back."""

    size_bytes: int
    changed_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> PublishedStamp:
        return cls(status.st_size, status.st_ctime_ns, status.st_ino)


@dataclass(frozen=True)
class UnitRecord:
    """A finished unit. `lines`: its part of the ledger, in file order. `stamps`: its files, taken after the rename."""

    lines: tuple[bytes, ...]
    errors_by_role: ErrorsByRole
    stamps: dict[str, PublishedStamp]


def _digest(table: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def render_record(record: UnitRecord) -> bytes:
    """The record as JSON, with a digest of its own."""
    table: dict[str, Any] = {
        "files": {name: asdict(stamp) for name, stamp in record.stamps.items()},
        "lines": [line.decode() for line in record.lines],
        "errors": {role: asdict(figures) for role, figures in record.errors_by_role.items()},
    }
    return json.dumps(table | {"sha256": _digest(table)}, ensure_ascii=False).encode()


def parse_record(raw: bytes) -> UnitRecord:
    """The record that `render_record` wrote; ValueError if a byte of it was changed."""
    try:
        table = json.loads(raw)
        digest = table.pop("sha256")
        if digest != _digest(table):
            raise ValueError("its digest is another")
        return UnitRecord(
            tuple(line.encode() for line in table["lines"]),
            {role: ErrorFigures(**figures) for role, figures in table["errors"].items()},
            {name: PublishedStamp(**stamp) for name, stamp in table["files"].items()},
        )
    except (KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise ValueError(f"is not a unit's record: {problem}") from None
