"""Whether a finished release is what its plan makes: every byte of it, and of its source, is hashed again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO

from memopt.compressor.balance import check_sizes, require_headers
from memopt.compressor.checkpoint.disk_errors import read_error
from memopt.compressor.job import Job, Source
from memopt.compressor.ledger import ErrorSummary
from memopt.compressor.output_folder import entries_of
from memopt.compressor.progress import CHECK_STAGE, ProgressCallback, ProgressMeter
from memopt.compressor.recheck import recorded_unit, require_outputs, require_sources
from memopt.compressor.units import Unit
from memopt.errors import ContentError, LayoutError, MemoptError, SourceChangedError
from memopt.manifests.file_names import CHUNKS_NAME, MANIFEST_NAME, SUMS_NAME, is_signature_name
from memopt.manifests.file_roles import LEDGER_NAME, QUALITY_NAMES
from memopt.manifests.release_description import RELEASE_NAME
from memopt.manifests.workers import run_workers


def require_complete(
    job: Job,
    out: Path,
    sizes: Mapping[str, int],
    *,
    workers: int,
    progress: ProgressCallback | None,
) -> dict[str, ErrorSummary]:
    """Compare the finished release `out` with job, ledger and source; its error figures by role.

    Nothing but the bytes can tell another checkpoint with the same headers, so that a folder's are all read; a Hub
    source is settled by its commit, whose digests were checked when it was fetched. Raises SourceChangedError,
    ContentError, SizeMismatchError or OutputError naming file and tensor.
    """
    try:
        check_sizes(out, sizes)
        _require_no_others(out, sizes)
        errors = _require_small_files(job, out)
        with (
            job.open_source() if job.must_read_source_again else nullcontext() as source,
            open(out / LEDGER_NAME, "rb") as ledger,
        ):
            _require_units(job, out, source, ledger, workers, progress)
            if source is not None:
                source.require_unchanged()
    except OSError as problem:
        raise read_error(problem, str(out)) from None
    except SourceChangedError as problem:
        raise _with_remedy(
            problem, f"{out} was made from another checkpoint: name another output folder, or remove it to make it anew"
        ) from None
    except ContentError as problem:
        raise _with_remedy(problem, f"remove {out} and run the same command again") from None
    return errors


def _require_no_others(out: Path, sizes: Mapping[str, int]) -> None:
    """LayoutError for a file that neither compress nor a signing made: the next signing would vouch for it."""
    made_later = {CHUNKS_NAME, MANIFEST_NAME, SUMS_NAME, *QUALITY_NAMES}
    for name in sorted(entries_of(out) - set(sizes) - made_later):
        if not is_signature_name(name):
            raise LayoutError(
                "lies in the finished release, but nothing of memopt made it",
                file=name,
                remedy=f"move it out of {out}",
            )


def _with_remedy(problem: MemoptError, remedy: str) -> MemoptError:
    problem.remedy = problem.remedy or remedy
    return problem


def _require_small_files(job: Job, out: Path) -> dict[str, ErrorSummary]:
    """release.json, the ledger's digest in it, and the files beside the weights."""
    raw = (out / RELEASE_NAME).read_bytes()
    try:
        table = json.loads(raw)
        errors = {str(role): ErrorSummary(**figures) for role, figures in table["totals"]["error"].items()}
        ledger_sha256 = table["ledger"]["sha256"]
        rendered = job.release(ledger_sha256=ledger_sha256, errors_by_role=errors)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        rendered = b""
    if raw != rendered:
        raise ContentError(
            "is not what this plan writes: it was changed, or made from another source",
            file=RELEASE_NAME,
            remedy=f"name another output folder, or remove {out} to make it anew",
        )
    digests = {file.name: file.sha256 for file in job.small_files} | {LEDGER_NAME: ledger_sha256}
    for name, digest in digests.items():
        with open(out / name, "rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != digest:
                raise ContentError("was changed after it was written: its SHA-256 is another", file=name)
    return errors


def _require_units(
    job: Job,
    out: Path,
    source: Source | None,
    ledger: BinaryIO,
    workers: int,
    progress: ProgressCallback | None,
) -> None:
    total = sum(unit.written_size_bytes for unit in job.units) + (0 if source is None else job.input_size_bytes())
    meter = ProgressMeter(progress, total, len(job.units), resumed_bytes=0, num_resumed_units=0, stage=CHECK_STAGE)

    def check(item: tuple[Unit, list[bytes]], buffer: memoryview, go_on: Callable[[], None]) -> None:
        unit, lines = item

        def advance(num_bytes: int) -> None:
            go_on()
            meter.advance(num_bytes, unit.file_name)

        require_headers(out, unit, "")
        recorded = recorded_unit(job, unit, lines, LEDGER_NAME)
        if source is not None:
            parts = job.source_parts(unit, recorded.rows)
            require_sources(source, job.part_files(unit), parts, buffer, advance)
        require_outputs(out, unit, recorded.digests, buffer, advance)
        meter.finish_unit(unit.file_name)

    run_workers(_units_with_lines(job, ledger), check, min(workers, len(job.units)))
    for line in job.tail_lines():
        if ledger.readline() != line:
            name = json.loads(line)["tensor"]
            raise ContentError("its line is not the planned one", tensor=name, file=LEDGER_NAME)


def _units_with_lines(job: Job, ledger: BinaryIO) -> Iterator[tuple[Unit, list[bytes]]]:
    """Each unit with its lines, in the ledger's order; one unit's at a time is in memory for each thread."""
    for unit in job.units:
        yield unit, [ledger.readline() for _ in unit.tensors]
