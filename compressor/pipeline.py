"""Running a job: small files first, units streamed by worker threads; then the balance closes it (balance.py)."""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from memopt.compressor.balance import balance
from memopt.compressor.calibration_options import CalibrationOptions
from memopt.compressor.calibration_summary import CalibrationSummary
from memopt.compressor.complete import require_complete
from memopt.compressor.compress_job import CompressJob
from memopt.compressor.job import Job, Source, Worker
from memopt.compressor.ledger import ErrorFigures, ErrorSummary, ledger_line
from memopt.compressor.output_folder import check_output_place, is_complete, remove_leftovers
from memopt.compressor.plan import Plan
from memopt.compressor.progress import ProgressCallback, ProgressMeter
from memopt.compressor.quantize.backend import QuantizeBackend
from memopt.compressor.ranks.unit_writer import UnitWriter
from memopt.compressor.resume import take_over
from memopt.compressor.run_ranks import RunRanks
from memopt.compressor.unit_folder import UnitFolder
from memopt.compressor.unit_record import ErrorsByRole
from memopt.compressor.units import Unit
from memopt.compressor.workspace import Workspace, release_file_names
from memopt.errors import ContentError, DiskFullError, InterruptedRunError, OutputError, SourceChangedError, UsageError
from memopt.manifests.workers import StartGate

POLL_SECONDS = 0.2
# Open files that are not of weights: libraries, the lock, small files, those of whoever calls.
RESERVED_FILES = 64
# What rank 0 says to the others when the release is complete already.
NOTHING_TO_DO = b"complete"


@dataclass(frozen=True)
class RunResult:
    """What a run made. Sizes in bytes; `num_resumed_units` were finished by an earlier run.

    `input_size_bytes`: source bytes behind the whole release; an earlier run read `resumed_size_bytes` of them.
    `source_root_digest`: hex, of the signed release that was sharded or merged; None if its signature was not checked.
    `layouts`: as "hub", "tp8"; `weights_size_bytes` counts a tensor once, `written_size_bytes` in every file.
    `left_behind`: files of a release that was sharded or merged which are about itself, not about its weights.
    `calibration_by_role`: of weights whose codes follow from calibration data, as the ledger has it.
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
    layouts: tuple[str, ...] = ("hub",)
    num_rank_files: int = 0
    written_size_bytes: int = 0
    source_root_digest: str | None = None
    left_behind: tuple[str, ...] = ()
    calibration_by_role: dict[str, CalibrationSummary] = field(default_factory=dict)


def run_job(
    job: Job,
    out: Path,
    *,
    workers: int = 1,
    progress: ProgressCallback | None = None,
    before_finish: Callable[[], None] | None = None,
    ranks: RunRanks | None = None,
) -> RunResult:
    """Carry out `job` into `out`; resumes an interrupted run of the same job, refuses any other.

    The bytes written depend neither on `workers` nor on interruptions. A finished release of the same job is read
    again, with its source, and left as it is. `before_finish` is called when all units are written and may still
    refuse. `ranks`: processes that share the work, all of which call this; the bytes do not depend on them either.
    Raises OutputError, DiskFullError, MemoptIOError for the folder; NonFiniteError, TruncatedError, SourceChangedError
    for the source; ContentError, SizeMismatchError if a file is not the planned one; InterruptedRunError on Ctrl-C.
    """
    started = time.monotonic()
    if workers < 1:
        raise UsageError(f"{workers} workers do nothing", remedy="use 1 or more")
    check_output_place(job.folder, out)
    ranks = ranks or RunRanks()
    sizes = job.planned_sizes()
    if not ranks.is_first:
        _help_first(job, out, workers, ranks)
        return _result(job, out, sizes, frozenset(), {}, started, was_complete=False)
    was_complete = is_complete(out, job.finished)
    if was_complete:
        ranks.from_first(NOTHING_TO_DO)
        remove_leftovers(out)
        resumed = frozenset(unit.number for unit in job.units)
        with _interruptible(f"stopped while {out}, which is complete, was checked; nothing was changed"):
            errors = require_complete(job, out, sizes, workers=workers, progress=progress)
    else:
        names = release_file_names(job.units, tuple(file.name for file in job.small_files))
        with (
            _interruptible(f"stopped; {out} keeps every finished unit"),
            job.open_source() as source,
            Workspace(out, job.fingerprint, names) as workspace,
        ):
            errors_by_unit = take_over(job, workspace, source, workers, progress)
            resumed = frozenset(errors_by_unit)
            done = {file.name for unit in job.units if unit.number in resumed for file in unit.files}
            _check_space(out, sizes, done, job.scratch_size_bytes(workspace.state))
            workspace.save_plan(source.stamps)
            workspace.make_folders(names)
            _write_small_files(job, workspace)
            todo = [unit for unit in job.units if unit.number not in resumed]
            ranks.from_first(json.dumps([job.fingerprint, *(unit.number for unit in todo)]).encode())
            job.prepare(workspace.state, workers, progress, ranks)
            meter = ProgressMeter(
                progress,
                job.input_size_bytes(),
                len(job.units),
                resumed_bytes=_resumed_size_bytes(job, resumed),
                num_resumed_units=len(resumed),
            )
            errors_by_unit |= _run_units(todo[:: ranks.num_ranks], job, source, workspace, workers, meter)
            ranks.barrier()
            errors_by_unit |= _done_by_others(todo, errors_by_unit, workspace)
            source.require_unchanged()
            if before_finish is not None:
                before_finish()
            errors = balance(job, workspace, errors_by_unit, sizes)
            ranks.barrier()
    return _result(job, out, sizes, resumed, errors, started, was_complete=was_complete)


def _help_first(job: Job, out: Path, workers: int, ranks: RunRanks) -> None:
    """What a rank other than 0 does of `run_job`: its share of the preparation and of the units.

    UsageError if it would make another release: of another source, recipe or calibration data, or with other libraries.
    OutputError if it does not see what rank 0 writes.
    """
    message = ranks.from_first(b"")
    if message == NOTHING_TO_DO:
        return
    fingerprint, *numbers = json.loads(message)
    if fingerprint != job.fingerprint:
        raise UsageError(
            f"rank {ranks.rank} would make another release than rank 0",
            remedy="start all ranks with one command, on one source, recipe, calibration file and set of libraries",
        )
    own = [unit for unit in job.units if unit.number in numbers][ranks.rank :: ranks.num_ranks]
    folder = UnitFolder(out)
    if not folder.state.is_dir():
        raise OutputError(
            f"rank {ranks.rank} does not see what rank 0 writes into {out}",
            remedy="name one output folder on all ranks, on a file system that all machines see",
        )
    with _interruptible(f"stopped; {out} keeps every finished unit"), job.open_source() as source:
        job.prepare(folder.state, workers, None, ranks)
        meter = ProgressMeter(None, job.input_size_bytes(own), len(own), resumed_bytes=0, num_resumed_units=0)
        _run_units(own, job, source, folder, workers, meter)
        source.require_unchanged()
        ranks.barrier()
        # Rank 0 closes the release; where it refuses, all ranks end with an error.
        ranks.barrier()


def _done_by_others(
    todo: Iterable[Unit], done: Mapping[int, ErrorsByRole], folder: UnitFolder
) -> dict[int, ErrorsByRole]:
    """Error figures of the units that other ranks wrote. ContentError if one of them is not there."""
    found: dict[int, ErrorsByRole] = {}
    for unit in todo:
        if unit.number not in done:
            finished = folder.finished_unit(unit)
            if finished is None:
                raise ContentError(
                    "another rank wrote it, and it is not there",
                    file=unit.file_name,
                    remedy="all ranks must see one output folder; run the same command again",
                )
            found[unit.number] = finished.errors_by_role
    return found


def _result(
    job: Job,
    out: Path,
    sizes: Mapping[str, int],
    resumed: frozenset[int],
    errors: dict[str, ErrorSummary],
    started: float,
    *,
    was_complete: bool,
) -> RunResult:
    return RunResult(
        out,
        len(job.units),
        len(resumed),
        sum(sizes.values()),
        sum(unit.data_size_bytes for unit in job.units),
        job.input_size_bytes(),
        _resumed_size_bytes(job, resumed),
        errors,
        time.monotonic() - started,
        was_complete,
        layouts=job.finished.layouts,
        num_rank_files=sum(len(unit.rank_files) for unit in job.units),
        written_size_bytes=sum(unit.written_size_bytes for unit in job.units),
        left_behind=job.left_behind,
    )


def run_plan(
    plan: Plan,
    out: Path,
    *,
    backend: QuantizeBackend,
    workers: int = 1,
    progress: ProgressCallback | None = None,
    before_finish: Callable[[], None] | None = None,
    calibration: CalibrationOptions | None = None,
    ranks: RunRanks | None = None,
) -> RunResult:
    """`run_job` for `plan`; the bytes do not depend on `backend` either. `calibration`: what the plan's identity of it
    was made from. UsageError for a plan from a config alone, and as `CompressJob`.
    """
    job = CompressJob(plan, backend, calibration)
    return run_job(job, out, workers=workers, progress=progress, before_finish=before_finish, ranks=ranks)


def _resumed_size_bytes(job: Job, numbers: frozenset[int]) -> int:
    return job.input_size_bytes([unit for unit in job.units if unit.number in numbers])


@contextmanager
def _interruptible(message: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise InterruptedRunError(message, remedy="run the same command again to go on") from None


def _check_space(out: Path, sizes: Mapping[str, int], present: set[str], scratch_size_bytes: int) -> None:
    needed = scratch_size_bytes + sum(size for name, size in sizes.items() if name not in present)
    free = shutil.disk_usage(out).free
    if free < needed:
        raise DiskFullError(
            f"{needed:,} bytes are still to be written, {free:,} are free",
            file=str(out),
            remedy="free some space and run the same command again: finished units are kept",
        )


def _write_small_files(job: Job, workspace: Workspace) -> None:
    for file in job.small_files:
        data = job.small_file(file.name)
        if len(data) != file.size_bytes or hashlib.sha256(data).hexdigest() != file.sha256:
            raise SourceChangedError(
                "was changed since it was planned", file=file.name, remedy="run the same command again: it plans anew"
            )
        workspace.write_file(file.name, data)


def _run_units(
    todo: Iterable[Unit],
    job: Job,
    source: Source,
    workspace: UnitFolder,
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
        with source.open_files(job.part_files(unit)) as reader:
            errors_by_role = _write_unit(unit, job, job.worker(reader, unit, advance), workspace, working)
        meter.finish_unit(unit.file_name)
        return errors_by_role

    num_threads = _num_threads(job, len(source.stamps), workers)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="memopt-unit") as pool:
        try:
            futures = {pool.submit(run, unit): unit.number for unit in todo}
            gate.open()
            _wait(set(futures))
        finally:
            gate.stop()
    return {number: future.result() for future, number in futures.items()}


def _num_threads(job: Job, num_source_files: int, workers: int) -> int:
    """Two units a worker, one at work while one waits for the disk; fewer if their files would be too many to open."""
    files_a_unit = max((len(unit.files) + len(job.part_files(unit)) for unit in job.units), default=1)
    room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - num_source_files - RESERVED_FILES
    return max(1, min(2 * workers, room // files_a_unit))


def _wait(futures: set[Future[ErrorsByRole]]) -> None:
    """Wait for all, or raise the first failure. Short waits let a signal reach the main thread."""
    while futures:
        done, futures = wait(futures, POLL_SECONDS, FIRST_EXCEPTION)
        for future in done:
            future.result()


def _write_unit(
    unit: Unit, job: Job, worker: Worker, workspace: UnitFolder, working: threading.BoundedSemaphore
) -> ErrorsByRole:
    """Make a unit's files and publish them; its error figures. The lines go to disk, not into the result.

    `working` is held while tensors are worked on, and let go before the files are flushed.
    """
    with UnitWriter(unit, workspace.temporary) as files:
        with working:
            results = [worker.run(plan, files) for plan in unit.tensors]
        digests = files.finish()
    lines = [ledger_line(row) for row in job.rows(unit, results, digests)]
    errors: ErrorsByRole = {}
    for plan, result in zip(unit.tensors, results, strict=True):
        if result.errors is not None:
            role = str(plan.source.spec.role)
            errors[role] = errors.get(role, ErrorFigures()) + result.errors
    workspace.publish_unit(unit, lines, errors)
    return errors
