"""Running a plan: small files first, units streamed by worker threads, then the balance: ledger and release.json."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from memopt.compressor.checkpoint.checkpoint import StoredTensor
from memopt.compressor.checkpoint.model_config import CONFIG_NAME
from memopt.compressor.checkpoint.reader import SourceReader
from memopt.compressor.checkpoint.writer import UnitFile
from memopt.compressor.fingerprint import plan_fingerprint
from memopt.compressor.ledger import LEDGER_NAME, ErrorFigures, TensorResult, ledger_line, ledger_row
from memopt.compressor.metadata_files import read_metadata
from memopt.compressor.plan import Plan
from memopt.compressor.progress import ProgressCallback, ProgressMeter
from memopt.compressor.quantize.backend import QuantizeBackend
from memopt.compressor.release_file import RELEASE_NAME, render_release
from memopt.compressor.tensor_plan import TensorPlan
from memopt.compressor.tensor_work import TensorWorker
from memopt.compressor.units import Unit
from memopt.compressor.workspace import (
    UnitRecord,
    Workspace,
    check_output_place,
    is_complete,
    release_file_names,
    remove_leftovers,
)
from memopt.errors import (
    ContentError,
    DiskFullError,
    InterruptedRunError,
    OutputError,
    SizeMismatchError,
    SourceChangedError,
    UsageError,
)
from memopt.manifests.safetensors_header import read_header
from memopt.manifests.safetensors_index import INDEX_NAME

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class RunResult:
    """What a run made. Sizes in bytes; `num_resumed_units` were finished by an earlier run.

    `root_digest`: hex, of the signed release; None if it was not signed.
    """

    out: Path
    num_units: int
    num_resumed_units: int
    total_size_bytes: int
    weights_size_bytes: int
    input_size_bytes: int
    errors_by_role: dict[str, ErrorFigures]
    seconds: float
    was_complete: bool
    root_digest: str | None = None


class _CancelledError(Exception):
    """Raised inside workers once another one has failed."""


def planned_sizes(plan: Plan) -> dict[str, int]:
    """Every output file and its exact size in bytes."""
    sizes = {file.name: file.size_bytes for file in plan.small_files}
    sizes |= {unit.file_name: unit.size_bytes for unit in plan.units}
    sizes[LEDGER_NAME] = plan.ledger_size_bytes()
    sizes[RELEASE_NAME] = len(render_release(plan))
    return sizes


def run_plan(
    plan: Plan,
    out: Path,
    *,
    backend: QuantizeBackend,
    workers: int = 1,
    progress: ProgressCallback | None = None,
    before_finish: Callable[[], None] | None = None,
) -> RunResult:
    """Carry out `plan` into `out`; resumes an interrupted run of the same plan, refuses any other.

    The bytes written do not depend on `workers`, on `backend`, or on interruptions. `before_finish` is called when all
    units are written and may still refuse.
    Raises OutputError, DiskFullError, MemoptIOError for the folder; NonFiniteError, TruncatedError, SourceChangedError
    for the source; SizeMismatchError if a file differs from the plan; InterruptedRunError on Ctrl-C.
    """
    started = time.monotonic()
    folder = plan.source.folder
    if folder is None:
        raise UsageError("a plan from a config alone has no weights", remedy="name a checkpoint folder")
    if workers < 1:
        raise UsageError(f"{workers} workers do nothing", remedy="use 1 or more")
    fingerprint = plan_fingerprint(plan)
    check_output_place(folder, out)
    sizes = planned_sizes(plan)
    if is_complete(out, fingerprint):
        remove_leftovers(out)
        _check_sizes(out, sizes)
        return _result(plan, out, sizes, {}, len(plan.units), started, was_complete=True)
    names = release_file_names(plan.units, tuple(file.name for file in plan.small_files))
    with _resumable(out), SourceReader(plan.source, folder) as reader, Workspace(out, fingerprint, names) as workspace:
        records = {unit.number: record for unit in plan.units if (record := workspace.finished_unit(unit)) is not None}
        _check_finished_sources(plan, workspace, reader, records)
        num_resumed = len(records)
        todo = [unit for unit in plan.units if unit.number not in records]
        _check_space(out, sizes, {unit.file_name for unit in plan.units} - {unit.file_name for unit in todo})
        workspace.save_plan(reader.stamps)
        _write_small_files(plan, folder, workspace)
        meter = ProgressMeter(
            progress,
            plan.input_size_bytes,
            len(plan.units),
            resumed_bytes=sum(unit.input_size_bytes for unit in plan.units if unit.number in records),
            num_resumed_units=num_resumed,
        )
        records |= _run_units(todo, reader, workspace, backend, workers, meter)
        reader.require_unchanged()
        if before_finish is not None:
            before_finish()
        errors = _finish(plan, workspace, records, sizes)
    return _result(plan, out, sizes, errors, num_resumed, started, was_complete=False)


@contextmanager
def _resumable(out: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise InterruptedRunError(
            f"stopped; {out} keeps every finished unit", remedy="run the same command again to go on"
        ) from None


def _result(
    plan: Plan,
    out: Path,
    sizes: dict[str, int],
    errors: dict[str, ErrorFigures],
    num_resumed: int,
    started: float,
    *,
    was_complete: bool,
) -> RunResult:
    return RunResult(
        out,
        len(plan.units),
        num_resumed,
        sum(sizes.values()),
        plan.weights_size_bytes,
        plan.input_size_bytes,
        errors,
        time.monotonic() - started,
        was_complete,
    )


def _check_space(out: Path, sizes: dict[str, int], present: set[str]) -> None:
    needed = sum(size for name, size in sizes.items() if name not in present)
    free = shutil.disk_usage(out).free
    if free < needed:
        raise DiskFullError(
            f"{needed:,} bytes are still to be written, {free:,} are free",
            file=str(out),
            remedy="free some space and run the same command again: finished units are kept",
        )


def _check_finished_sources(
    plan: Plan, workspace: Workspace, reader: SourceReader, records: dict[int, UnitRecord]
) -> None:
    """If a source file was touched since the interrupted run, compare what finished units read with what it holds."""
    before = workspace.source_stamps
    if before is None:
        return
    touched = {name for name, stamp in reader.stamps.items() if before.get(name) != stamp}
    for unit in plan.units if touched else ():
        record = records.get(unit.number)
        if record is None:
            continue
        parts = {part.name: part for tensor in unit.tensors for part in tensor.source.parts if part.file in touched}
        for line in record.lines:
            for source in json.loads(line)["sources"]:
                part = parts.get(source["name"])
                if part is not None and _digest(reader, part) != source["sha256"]:
                    raise SourceChangedError(
                        "differs from what the interrupted run read",
                        tensor=part.name,
                        file=part.file,
                        remedy=f"restore the source, or remove {workspace.out} to start anew",
                    )


def _digest(reader: SourceReader, part: StoredTensor, step: int = 2**22) -> str:
    state = hashlib.sha256()
    buffer = bytearray(step)
    for offset in range(0, part.size_bytes, step):
        view = memoryview(buffer)[: min(step, part.size_bytes - offset)]
        reader.read_into(part, offset, view)
        state.update(view)
    return state.hexdigest()


def _write_small_files(plan: Plan, folder: Path, workspace: Workspace) -> None:
    made = {CONFIG_NAME: plan.config_bytes, INDEX_NAME: plan.index_bytes}
    for file in plan.small_files:
        data = made[file.name] if file.origin == "memopt" else read_metadata(folder / file.name)
        if len(data) != file.size_bytes or hashlib.sha256(data).hexdigest() != file.sha256:
            raise SourceChangedError("was changed since it was planned", file=file.name)
        workspace.write_file(file.name, data)


def _run_units(
    todo: Iterable[Unit],
    reader: SourceReader,
    workspace: Workspace,
    backend: QuantizeBackend,
    workers: int,
    meter: ProgressMeter,
) -> dict[int, UnitRecord]:
    cancelled = threading.Event()

    def run(unit: Unit) -> UnitRecord:
        def advance(num_bytes: int) -> None:
            if cancelled.is_set():
                raise _CancelledError
            meter.advance(num_bytes, unit.file_name)

        if cancelled.is_set():
            raise _CancelledError
        record = _write_unit(unit, TensorWorker(reader, backend, advance), workspace)
        meter.finish_unit(unit.file_name)
        return record

    with ThreadPoolExecutor(workers, thread_name_prefix="memopt-unit") as pool:
        futures = {pool.submit(run, unit): unit.number for unit in todo}
        try:
            _wait(set(futures))
        finally:
            cancelled.set()
    return {number: future.result() for future, number in futures.items()}


def _wait(futures: set[Future[UnitRecord]]) -> None:
    """Wait for all, or raise the first failure. Short waits let a signal reach the main thread."""
    while futures:
        done, futures = wait(futures, POLL_SECONDS, FIRST_EXCEPTION)
        for future in done:
            future.result()


def _write_unit(unit: Unit, worker: TensorWorker, workspace: Workspace) -> UnitRecord:
    results: list[tuple[TensorPlan, TensorResult]] = []
    with UnitFile(workspace.temporary(unit.file_name), unit.header, unit.layout) as out:
        for plan in unit.tensors:
            results.append((plan, worker.run(plan, out)))
        digests = out.finish()
    placed = {header.name: header for header in unit.layout}
    lines: list[bytes] = []
    errors: dict[str, ErrorFigures] = {}
    for plan, result in results:
        outputs = {output.name: digests[output.name] for output in plan.outputs}
        row = ledger_row(plan, unit.file_name, placed, TensorResult(result.source_sha256, outputs, result.errors))
        lines.append(ledger_line(row))
        if result.errors is not None:
            role = str(plan.source.spec.role)
            errors[role] = errors.get(role, ErrorFigures()) + result.errors
    record = UnitRecord(tuple(lines), errors)
    workspace.publish_unit(unit, record)
    return record


def _finish(
    plan: Plan, workspace: Workspace, records: dict[int, UnitRecord], sizes: dict[str, int]
) -> dict[str, ErrorFigures]:
    """Read back every header, write ledger and release.json, compare every size with the plan, drop the state."""
    errors: dict[str, ErrorFigures] = {}
    lines: list[bytes] = []
    for unit in plan.units:
        header = read_header(workspace.out / unit.file_name)
        if header.tensors != unit.layout:
            raise ContentError("its header is not the planned one", file=unit.file_name)
        record = records[unit.number]
        lines += record.lines
        for role, figures in sorted(record.errors_by_role.items()):
            errors[role] = errors.get(role, ErrorFigures()) + figures
    lines += [ledger_line(ledger_row(tensor, "", {}, None)) for tensor in plan.tensors if not tensor.outputs]
    ledger = b"".join(lines)
    workspace.write_file(LEDGER_NAME, ledger)
    release = render_release(plan, ledger_sha256=hashlib.sha256(ledger).hexdigest(), errors_by_role=errors)
    workspace.write_file(RELEASE_NAME, release)
    _check_sizes(workspace.out, sizes)
    workspace.finish()
    return errors


def _check_sizes(out: Path, sizes: dict[str, int]) -> None:
    """SizeMismatchError unless every file of the release has exactly the planned size."""
    for name, size_bytes in sizes.items():
        try:
            found = (out / name).stat().st_size
        except OSError:
            raise OutputError("is missing from the finished release", file=name) from None
        if found != size_bytes:
            raise SizeMismatchError(f"has {found:,} bytes, the plan gave it {size_bytes:,}", file=name)
