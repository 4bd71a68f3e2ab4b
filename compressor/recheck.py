"""Hashing again what a finished unit read and wrote, against its lines of the ledger."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from memopt.compressor.job import Advance, Job, Source, SourcePart
from memopt.compressor.ledger import TensorResult
from memopt.compressor.ranks.cut import cut_of
from memopt.compressor.ranks.unit_digests import UnitDigests
from memopt.compressor.tensor_plan import TensorPlan
from memopt.compressor.units import Unit
from memopt.errors import ContentError, SourceChangedError
from memopt.manifests.hashing import read_into
from memopt.manifests.open_file import open_regular


@dataclass(frozen=True)
class RecordedUnit:
    """A unit's rows of the ledger, and the digests in them of what its files hold."""

    rows: list[dict[str, Any]]
    digests: UnitDigests


def recorded_unit(job: Job, unit: Unit, lines: Sequence[bytes], ledger: str) -> RecordedUnit:
    """What `lines` of file `ledger` say of a unit's tensors.

    ContentError unless they are the job's lines in all but digests and figures.
    """
    rows: list[dict[str, Any]] = []
    results: list[TensorResult] = []
    whole: dict[str, str] = {}
    ranks: dict[str, tuple[str, ...]] = {}
    for plan, line in zip(unit.tensors, lines, strict=True):
        try:
            row = json.loads(line)
            results.append(TensorResult({part["name"]: part["sha256"] for part in row["sources"]}))
            whole |= {output["name"]: output["sha256"] for output in row["outputs"]}
            if unit.ranks is not None:
                ranks |= {output["name"]: tuple(output["ranks"]["sha256"]) for output in row["outputs"]}
        except (ValueError, KeyError, TypeError, RecursionError):
            raise _not_planned(plan, ledger) from None
        rows.append(row)
    digests = UnitDigests(whole, ranks)
    for plan, row, planned in zip(unit.tensors, rows, job.rows(unit, results, digests), strict=True):
        if row | {"error": None} != planned | {"error": None}:
            raise _not_planned(plan, ledger)
        for output in plan.outputs:
            if unit.ranks is not None and len(ranks[output.name]) != cut_of(output, plan, unit.ranks).num_digests:
                raise _not_planned(plan, ledger)
    return RecordedUnit(rows, digests)


def _not_planned(plan: TensorPlan, ledger: str) -> ContentError:
    return ContentError("its line is not the planned one", tensor=plan.source.spec.name, file=ledger)


def require_outputs(out: Path, unit: Unit, digests: UnitDigests, buffer: memoryview, advance: Advance) -> None:
    """ContentError naming the first tensor of the unit's files whose bytes are not those that were recorded."""
    for file in unit.files:
        with open_regular(out / file.name) as (descriptor, status):
            data_start = status.st_size - file.data_size_bytes
            for tensor in file.layout:
                known = (digests.whole[tensor.name],) if file.rank is None else digests.ranks[tensor.name]
                digest = known[0 if len(known) == 1 else file.rank or 0]
                read = partial(_read_at, descriptor, data_start + tensor.start, file.name)
                if _sha256(read, tensor.size_bytes, buffer, advance) != digest:
                    raise ContentError(
                        "was changed after it was written: its SHA-256 is not the recorded one",
                        tensor=tensor.name,
                        file=file.name,
                    )


def require_sources(
    source: Source, files: Collection[str], parts: Iterable[SourcePart], buffer: memoryview, advance: Advance
) -> None:
    """SourceChangedError naming the first of `parts` in one of `files` whose bytes are not those that were read."""
    wanted = [part for part in parts if part.tensor.file in files]
    with source.open_files({part.tensor.file for part in wanted}) as reader:
        for part in wanted:
            tensor = part.tensor
            if _sha256(partial(reader.read_into, tensor), tensor.size_bytes, buffer, advance) != part.sha256:
                raise SourceChangedError("differs from what was read before", tensor=tensor.name, file=tensor.file)


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
