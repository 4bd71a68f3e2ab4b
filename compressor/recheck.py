"""Hashing again what a finished unit read and wrote, against its lines of the ledger."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from memopt.compressor.checkpoint.reader import SourceReader
from memopt.compressor.ledger import TensorResult, ledger_row
from memopt.compressor.tensor_plan import TensorPlan
from memopt.compressor.units import Unit
from memopt.errors import ContentError, SourceChangedError
from memopt.manifests.hashing import read_into
from memopt.manifests.open_file import open_regular

# Called with the number of bytes hashed just now; raises to stop.
Advance = Callable[[int], None]


@dataclass(frozen=True)
class RecordedTensor:
    """One line of the ledger: a tensor's plan, and the SHA-256 (hex) of its parts and outputs, by stored name."""

    plan: TensorPlan
    source_sha256: dict[str, str]
    output_sha256: dict[str, str]


def recorded_tensors(unit: Unit, lines: Iterable[bytes], ledger: str) -> list[RecordedTensor]:
    """What `lines` of file `ledger` say of a unit's tensors.

    ContentError unless they are the plan's lines in all but digests and figures.
    """
    placed = {header.name: header for header in unit.layout}
    recorded: list[RecordedTensor] = []
    for plan, line in zip(unit.tensors, lines, strict=True):
        try:
            row = json.loads(line)
            found = RecordedTensor(
                plan,
                {part["name"]: part["sha256"] for part in row["sources"]},
                {part["name"]: part["sha256"] for part in row["outputs"]},
            )
        except (ValueError, KeyError, TypeError, RecursionError):
            row, found = None, RecordedTensor(plan, {}, {})
        planned = ledger_row(plan, unit.file_name, placed, TensorResult(found.source_sha256), found.output_sha256)
        if row is None or row | {"error": None} != planned | {"error": None}:
            raise ContentError("its line is not the planned one", tensor=plan.source.spec.name, file=ledger)
        recorded.append(found)
    return recorded


def require_outputs(
    out: Path, unit: Unit, recorded: Iterable[RecordedTensor], buffer: memoryview, advance: Advance
) -> None:
    """ContentError naming the first tensor of the unit's file whose bytes are not those that were recorded."""
    placed = {header.name: header for header in unit.layout}
    with open_regular(out / unit.file_name) as (descriptor, _):
        for tensor in recorded:
            for name, digest in tensor.output_sha256.items():
                read = partial(_read_at, descriptor, len(unit.header) + placed[name].start, unit.file_name)
                if _sha256(read, placed[name].size_bytes, buffer, advance) != digest:
                    raise ContentError(
                        "was changed after it was written: its SHA-256 is not the recorded one",
                        tensor=name,
                        file=unit.file_name,
                    )


def require_sources(
    reader: SourceReader,
    files: Collection[str],
    recorded: Iterable[RecordedTensor],
    buffer: memoryview,
    advance: Advance,
) -> None:
    """SourceChangedError naming the first part in one of `files` whose bytes are not those that were read."""
    for tensor in recorded:
        for part in tensor.plan.source.parts:
            if part.file not in files:
                continue
            if (
                _sha256(partial(reader.read_into, part), part.size_bytes, buffer, advance)
                != tensor.source_sha256[part.name]
            ):
                raise SourceChangedError("differs from what was read before", tensor=part.name, file=part.file)


def _read_at(descriptor: int, start: int, file: str, offset: int, view: memoryview) -> None:
    read_into(descriptor, view, start + offset, file)


def _sha256(read: Callable[[int, memoryview], None], size_bytes: int, buffer: memoryview, advance: Advance) -> str:
    state = hashlib.sha256()
    for offset in range(0, size_bytes, buffer.nbytes):
        view = buffer[: min(buffer.nbytes, size_bytes - offset)]
        read(offset, view)
        state.update(view)
        advance(view.nbytes)
    return state.hexdigest()
