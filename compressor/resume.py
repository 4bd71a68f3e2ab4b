"""What an interrupted run finished, taken over where it still is what was recorded."""

from __future__ import annotations

from collections.abc import Callable

from memopt.compressor.job import Job, Source
from memopt.compressor.progress import CHECK_STAGE, ProgressCallback, ProgressMeter
from memopt.compressor.recheck import recorded_unit, require_outputs, require_sources
from memopt.compressor.unit_folder import FinishedUnit
from memopt.compressor.unit_record import ErrorsByRole
from memopt.compressor.units import Unit
from memopt.compressor.workspace import Workspace
from memopt.errors import ContentError, LayoutError, MemoptIOError, SourceChangedError
from memopt.manifests.workers import run_workers


def take_over(
    job: Job, workspace: Workspace, source: Source, workers: int, progress: ProgressCallback | None
) -> dict[int, ErrorsByRole]:
    """Error figures of the units that need not be done again, by unit number.

    A unit with a file that was touched since it was published is hashed again, and left out if it differs. If a source
    file was touched, what the units read from it is compared: SourceChangedError if it differs, or they would mix.
    """
    found = {unit.number: done for unit in job.units if (done := workspace.finished_unit(unit)) is not None}
    before = workspace.source_stamps or {}
    touched = {name for name, stamp in source.stamps.items() if before.get(name) != stamp}
    todo = [
        unit
        for unit in job.units
        if unit.number in found and (not found[unit.number].is_untouched or _touched_size_bytes(job, unit, touched))
    ]
    meter = ProgressMeter(
        progress,
        sum(_check_size_bytes(job, unit, found[unit.number], touched) for unit in todo),
        len(todo),
        resumed_bytes=0,
        num_resumed_units=0,
        stage=CHECK_STAGE,
    )
    spoiled: set[int] = set()

    def check(unit: Unit, buffer: memoryview, go_on: Callable[[], None]) -> None:
        def advance(num_bytes: int) -> None:
            go_on()
            meter.advance(num_bytes, unit.file_name)

        if not _is_whole(job, workspace, unit, found[unit.number], source, touched, buffer, advance):
            spoiled.add(unit.number)
        meter.finish_unit(unit.file_name)

    run_workers(todo, check, min(workers, len(todo)))
    return {number: done.errors_by_role for number, done in found.items() if number not in spoiled}


def _is_whole(
    job: Job,
    workspace: Workspace,
    unit: Unit,
    done: FinishedUnit,
    source: Source,
    touched: set[str],
    buffer: memoryview,
    advance: Callable[[int], None],
) -> bool:
    try:
        recorded = recorded_unit(job, unit, workspace.unit_lines(unit), unit.file_name)
        if not done.is_untouched:
            require_outputs(workspace.out, unit, recorded.digests, buffer, advance)
    except (ContentError, LayoutError, MemoptIOError):
        # Whatever was done to it, doing it again makes it right.
        return False
    try:
        require_sources(source, touched, job.source_parts(unit, recorded.rows), buffer, advance)
    except SourceChangedError as problem:
        raise SourceChangedError(
            "differs from what the interrupted run read",
            tensor=problem.tensor,
            file=problem.file,
            remedy=f"restore the source, or remove {workspace.out} to start anew",
        ) from None
    return True


def _touched_size_bytes(job: Job, unit: Unit, touched: set[str]) -> int:
    return sum(size for name, size in job.part_files(unit).items() if name in touched) if touched else 0


def _check_size_bytes(job: Job, unit: Unit, done: FinishedUnit, touched: set[str]) -> int:
    return (0 if done.is_untouched else unit.written_size_bytes) + _touched_size_bytes(job, unit, touched)
