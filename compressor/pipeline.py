"""Running a plan: small files first, units streamed by worker threads; then the balance closes it (balance.py)."""

from __future__ import annotations

import hashlib
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from memopt.compressor.balance import balance
from memopt.compressor.checkpoint.model_config import CONFIG_NAME
from memopt.compressor.checkpoint.reader import SourceReader
from memopt.compressor.checkpoint.writer import UnitFile
from memopt.compressor.complete import require_complete
from memopt.compressor.fingerprint import plan_fingerprint
from memopt.compressor.ledger import ErrorFigures, ErrorSummary, ledger_line, ledger_row
from memopt.compressor.metadata_files import read_metadata
from memopt.compressor.output_folder import check_output_place, is_complete, remove_leftovers
from memopt.compressor.plan import Plan
from memopt.compressor.progress import ProgressCallback, ProgressMeter
from memopt.compressor.quantize.backend import QuantizeBackend
from memopt.compressor.release_file import render_release
from memopt.compressor.resume import take_over
from memopt.compressor.tensor_work import TensorWorker
from memopt.compressor.unit_record import ErrorsByRole
from memopt.compressor.units import Unit
from memopt.compressor.workspace import Workspace, release_file_names
from memopt.errors import DiskFullError, InterruptedRunError, SourceChangedError, UsageError
from memopt.manifests.file_roles import LEDGER_NAME
from memopt.manifests.release_description import RELEASE_NAME
from memopt.manifests.safetensors_index import INDEX_NAME
from memopt.manifests.workers import StartGate

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class RunResult:
    """What a run made. Sizes in bytes; `num_resumed_units` were finished by an earlier run.

    `input_size_bytes`: source bytes behind the whole release; an earlier run read `resumed_size_bytes` of them.
    `root_digest`: hex, of the signed release; None if it was not signed. `sign_notes`: what its verifiers must allow.
    """

    out: Path
    num_units: int
    num_resumed_units: int
    total_size_bytes: int
    weights_size_bytes: int
    input_size_bytes: int
    resumed_size_bytes: int
    errors_by_role: dict[str, ErrorSummary]
    seconds: float
    was_complete: bool
    root_digest: str | None = None
    sign_notes: tuple[str, ...] = ()


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

    The bytes written do not depend on `workers`, on `backend`, or on interruptions. A finished release of the same
    plan is read again, with its source, and left as it is. `before_finish` is called when all units are written and
    may still refuse.
    Raises OutputError, DiskFullError, MemoptIOError for the folder; NonFiniteError, TruncatedError, SourceChangedError
    for the source; ContentError, SizeMismatchError if a file is not the planned one; InterruptedRunError on Ctrl-C.
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
    was_complete = is_complete(out, fingerprint)
    if was_complete:
        remove_leftovers(out)
        resumed = frozenset(unit.number for unit in plan.units)
        with _interruptible(f"stopped while {out}, which is complete, was checked; nothing was changed"):
            errors = require_complete(plan, folder, out, fingerprint, sizes, workers=workers, progress=progress)
    else:
        names = release_file_names(plan.units, tuple(file.name for file in plan.small_files))
        with (
            _interruptible(f"stopped; {out} keeps every finished unit"),
            SourceReader(plan.source, folder) as reader,
            Workspace(out, fingerprint, names) as workspace,
        ):
            errors_by_unit = take_over(plan, workspace, reader, workers, progress)
            resumed = frozenset(errors_by_unit)
            _check_space(out, sizes, {unit.file_name for unit in plan.units if unit.number in resumed})
            workspace.save_plan(reader.stamps)
            _write_small_files(plan, folder, workspace)
            meter = ProgressMeter(
                progress,
                plan.input_size_bytes,
                len(plan.units),
                resumed_bytes=_input_size_bytes(plan, resumed),
                num_resumed_units=len(resumed),
            )
            todo = [unit for unit in plan.units if unit.number not in resumed]
            errors_by_unit |= _run_units(todo, reader, workspace, backend, workers, meter)
            reader.require_unchanged()
            if before_finish is not None:
                before_finish()
            errors = balance(plan, workspace, errors_by_unit, fingerprint, sizes)
    return RunResult(
        out,
        len(plan.units),
        len(resumed),
        sum(sizes.values()),
        plan.weights_size_bytes,
        plan.input_size_bytes,
        _input_size_bytes(plan, resumed),
        errors,
        time.monotonic() - started,
        was_complete,
    )


def _input_size_bytes(plan: Plan, numbers: frozenset[int]) -> int:
    return sum(unit.input_size_bytes for unit in plan.units if unit.number in numbers)


@contextmanager
def _interruptible(message: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise InterruptedRunError(message, remedy="run the same command again to go on") from None


def _check_space(out: Path, sizes: Mapping[str, int], present: set[str]) -> None:
    needed = sum(size for name, size in sizes.items() if name not in present)
    free = shutil.disk_usage(out).free
    if free < needed:
        raise DiskFullError(
            f"{needed:,} bytes are still to be written, {free:,} are free",
            file=str(out),
            remedy="free some space and run the same command again: finished units are kept",
        )


def _write_small_files(plan: Plan, folder: Path, workspace: Workspace) -> None:
    made = {CONFIG_NAME: plan.config_bytes, INDEX_NAME: plan.index_bytes}
    for file in plan.small_files:
        data = made[file.name] if file.origin == "memopt" else read_metadata(folder / file.name)
        if len(data) != file.size_bytes or hashlib.sha256(data).hexdigest() != file.sha256:
            raise SourceChangedError(
                "was changed since it was planned", file=file.name, remedy="run the same command again: it plans anew"
            )
        workspace.write_file(file.name, data)


def _run_units(
    todo: Iterable[Unit],
    reader: SourceReader,
    workspace: Workspace,
    backend: QuantizeBackend,
    workers: int,
    meter: ProgressMeter,
) -> dict[int, ErrorsByRole]:
    gate = StartGate()
    # A unit that waits for the disk to take its last bytes does not keep a core from the next one.
    working = threading.BoundedSemaphore(workers)

    def run(unit: Unit) -> ErrorsByRole:
        def advance(num_bytes: int) -> None:
            gate.check()
            meter.advance(num_bytes, unit.file_name)

        gate.enter()
        errors_by_role = _write_unit(unit, TensorWorker(reader, backend, advance), workspace, working)
        meter.finish_unit(unit.file_name)
        return errors_by_role

    with ThreadPoolExecutor(2 * workers, thread_name_prefix="memopt-unit") as pool:
        try:
            futures = {pool.submit(run, unit): unit.number for unit in todo}
            gate.open()
            _wait(set(futures))
        finally:
            gate.stop()
    return {number: future.result() for future, number in futures.items()}


def _wait(futures: set[Future[ErrorsByRole]]) -> None:
    """Wait for all, or raise the first failure. Short waits let a signal reach the main thread."""
    while futures:
        done, futures = wait(futures, POLL_SECONDS, FIRST_EXCEPTION)
        for future in done:
            future.result()


def _write_unit(
    unit: Unit, worker: TensorWorker, workspace: Workspace, working: threading.BoundedSemaphore
) -> ErrorsByRole:
    """Make one output file and publish it; its error figures. The lines go to disk, not into the result.

    `working` is held while tensors are worked on, and let go before the file is flushed.
    """
    with UnitFile(workspace.temporary(unit.file_name), unit.header, unit.layout) as file:
        with working:
            results = [worker.run(plan, file) for plan in unit.tensors]
        written = file.finish()
    placed = {header.name: header for header in unit.layout}
    lines: list[bytes] = []
    errors: ErrorsByRole = {}
    for plan, result in zip(unit.tensors, results, strict=True):
        lines.append(ledger_line(ledger_row(plan, unit.file_name, placed, result, written)))
        if result.errors is not None:
            role = str(plan.source.spec.role)
            errors[role] = errors.get(role, ErrorFigures()) + result.errors
    workspace.publish_unit(unit, lines, errors)
    return errors
