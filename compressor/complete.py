"""Whether a finished release is what its plan makes: every byte of it, and of its source, is hashed again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO

from memopt.compressor.balance import check_sizes
from memopt.compressor.checkpoint.disk_errors import read_error
from memopt.compressor.checkpoint.reader import SourceReader
from memopt.compressor.ledger import ErrorSummary, ledger_line, ledger_row
from memopt.compressor.output_folder import entries_of
from memopt.compressor.plan import Plan
from memopt.compressor.progress import CHECK_STAGE, ProgressCallback, ProgressMeter
from memopt.compressor.recheck import recorded_tensors, require_outputs, require_sources
from memopt.compressor.release_file import render_release
from memopt.compressor.units import Unit
from memopt.errors import ContentError, LayoutError, MemoptError, SourceChangedError
from memopt.manifests.file_names import CHUNKS_NAME, MANIFEST_NAME, SUMS_NAME, is_signature_name
from memopt.manifests.file_roles import LEDGER_NAME, QUALITY_NAMES
from memopt.manifests.release_description import RELEASE_NAME
from memopt.manifests.safetensors_header import read_header
from memopt.manifests.workers import run_workers


def require_complete(
    plan: Plan,
    source: Path,
    out: Path,
    fingerprint: str,
    sizes: Mapping[str, int],
    *,
    workers: int,
    progress: ProgressCallback | None,
) -> dict[str, ErrorSummary]:
    """Compare the finished release `out` with plan, ledger and source; its error figures by role.

    Nothing but the bytes can tell another checkpoint with the same headers, so that a folder's are all read; a Hub
    source is settled by its commit, whose digests were checked when it was fetched. Raises SourceChangedError,
    ContentError, SizeMismatchError or OutputError naming file and tensor.
    """
    try:
        check_sizes(out, sizes)
        _require_no_others(out, sizes)
        errors = _require_small_files(plan, out, fingerprint)
        is_folder = plan.identity.kind == "folder"
        with (
            SourceReader(plan.source, source) if is_folder else nullcontext() as reader,
            open(out / LEDGER_NAME, "rb") as ledger,
        ):
            _require_units(plan, out, reader, ledger, workers, progress)
            if reader is not None:
                reader.require_unchanged()
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


def _require_small_files(plan: Plan, out: Path, fingerprint: str) -> dict[str, ErrorSummary]:
    """release.json, the ledger's digest in it, and the files beside the weights."""
    raw = (out / RELEASE_NAME).read_bytes()
    try:
        table = json.loads(raw)
        errors = {str(role): ErrorSummary(**figures) for role, figures in table["totals"]["error"].items()}
        ledger_sha256 = table["ledger"]["sha256"]
        rendered = render_release(plan, fingerprint=fingerprint, ledger_sha256=ledger_sha256, errors_by_role=errors)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        rendered = b""
    if raw != rendered:
        raise ContentError("is not what this plan writes", file=RELEASE_NAME)
    digests = {file.name: file.sha256 for file in plan.small_files} | {LEDGER_NAME: ledger_sha256}
    for name, digest in digests.items():
        with open(out / name, "rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != digest:
                raise ContentError("was changed after it was written: its SHA-256 is another", file=name)
    return errors


def _require_units(
    plan: Plan,
    out: Path,
    reader: SourceReader | None,
    ledger: BinaryIO,
    workers: int,
    progress: ProgressCallback | None,
) -> None:
    total = plan.weights_size_bytes + (0 if reader is None else plan.input_size_bytes)
    meter = ProgressMeter(progress, total, len(plan.units), resumed_bytes=0, num_resumed_units=0, stage=CHECK_STAGE)
    files = frozenset(plan.source.files)

    def check(item: tuple[Unit, list[bytes]], buffer: memoryview, go_on: Callable[[], None]) -> None:
        unit, lines = item

        def advance(num_bytes: int) -> None:
            go_on()
            meter.advance(num_bytes, unit.file_name)

        if read_header(out / unit.file_name).tensors != unit.layout:
            raise ContentError("its header is not the planned one", file=unit.file_name)
        recorded = recorded_tensors(unit, lines, LEDGER_NAME)
        if reader is not None:
            require_sources(reader, files, recorded, buffer, advance)
        require_outputs(out, unit, recorded, buffer, advance)
        meter.finish_unit(unit.file_name)

    run_workers(_units_with_lines(plan, ledger), check, min(workers, len(plan.units)))
    for tensor in plan.tensors:
        if not tensor.outputs and ledger.readline() != ledger_line(ledger_row(tensor, "", {})):
            raise ContentError("its line is not the planned one", tensor=tensor.source.spec.name, file=LEDGER_NAME)


def _units_with_lines(plan: Plan, ledger: BinaryIO) -> Iterator[tuple[Unit, list[bytes]]]:
    """Each unit with its lines, in the ledger's order; one unit's at a time is in memory for each thread."""
    for unit in plan.units:
        yield unit, [ledger.readline() for _ in unit.tensors]
