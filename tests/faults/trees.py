"""What lies in an output folder: names, bytes, inodes, finished units."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from memopt.compressor.workspace import STATE_FOLDER

Stamps = dict[str, tuple[int, int]]


def tree(folder: Path) -> dict[str, str]:
    """Every entry below `folder`, hidden ones too: relative name -> sha256 of the bytes, or "folder"."""
    return {
        str(path.relative_to(folder)): "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
    }


def finished_units(out: Path) -> set[str]:
    """Names of the weight files that the unfinished run in `out` has recorded as finished."""
    names: set[str] = set()
    for record in (out / STATE_FOLDER / "units").glob("*.json"):
        first = json.loads(json.loads(record.read_bytes())["lines"][0])
        names.add(first["outputs"][0]["file"])
    return names


def finished_files(out: Path) -> set[str]:
    """Names of all files, rank files too, of the units that the unfinished run in `out` has recorded as finished."""
    records = (out / STATE_FOLDER / "units").glob("*.json")
    return {name for record in records for name in json.loads(record.read_bytes())["files"]}


def stamps(out: Path, names: set[str]) -> Stamps:
    """(inode, modification time) of each of `names`: equal stamps mean that the file was not written again."""
    return {name: ((out / name).stat().st_ino, (out / name).stat().st_mtime_ns) for name in names}


def ledger_rows(out: Path) -> list[dict[str, Any]]:
    """The rows of a finished release's ledger."""
    return [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]
