"""A verdict for machines: one JSON object (docs/verdict.md), and a short form that fits a termination message."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from memopt.manifests.verdict import VERIFY_SCHEMA, Verdict, first_finding

# Kubernetes keeps this much of /dev/termination-log.
MAX_TERMINATION_BYTES = 4096
_MAX_SHORT_TEXT = 300


def verdict_fields(verdict: Verdict, command: str = "verify") -> dict[str, Any]:
    """The verdict as a JSON object. `code`, `message` and `file` are those of the finding that gave the exit code."""
    first = first_finding(verdict)
    return {
        "schema": VERIFY_SCHEMA,
        "command": command,
        "status": "ok" if verdict.is_ok else "refused",
        "exit_code": verdict.exit_code,
        "code": None if first is None else first.code,
        "message": None if first is None else first.message,
        "remedy": None if first is None else first.remedy,
        "file": None if first is None else first.file,
        "partial": verdict.is_partial,
        "identity": verdict.identity,
        "counter": verdict.counter,
        "root_digest": verdict.root_digest,
        "key_hints": list(verdict.key_hints),
        "files": verdict.num_files,
        "verified_files": verdict.num_verified_files,
        "verified_bytes": verdict.verified_bytes,
        "seconds": round(verdict.seconds, 3),
        "findings": [asdict(finding) for finding in verdict.findings],
        "warnings": list(verdict.warnings),
    }


def short_json(fields: dict[str, Any], max_size_bytes: int = MAX_TERMINATION_BYTES) -> bytes:
    """One line of JSON of at most `max_size_bytes`: long texts are cut, then warnings and last findings left out.

    `left_out` counts what is missing.
    """
    short = {key: _cut(value) for key, value in fields.items()}
    lists = {name: [_cut(entry) for entry in fields.get(name, [])[:64]] for name in ("findings", "warnings")}
    totals = {name: len(fields.get(name, [])) for name in lists}
    while True:
        left_out = sum(totals[name] - len(entries) for name, entries in lists.items())
        line = json.dumps(short | lists | {"left_out": left_out}, separators=(",", ":")).encode() + b"\n"
        if len(line) <= max_size_bytes or not any(lists.values()):
            break
        (lists["warnings"] or lists["findings"]).pop()
    if len(line) > max_size_bytes:
        kept = {name: short.get(name) for name in ("schema", "command", "status", "exit_code", "code")}
        line = json.dumps(kept, separators=(",", ":")).encode() + b"\n"
    return line


def _cut(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _MAX_SHORT_TEXT:
        return value[:_MAX_SHORT_TEXT] + "…"
    if isinstance(value, dict):
        return {key: _cut(entry) for key, entry in value.items()}
    return value
