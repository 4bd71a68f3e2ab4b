"""The end of a run: headers are read back, ledger and release.json written, all sizes compared with the plan."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from memopt.compressor.job import Job
from memopt.compressor.ledger import ErrorFigures, ErrorSummary
from memopt.compressor.unit_record import ErrorsByRole
from memopt.compressor.units import Unit
from memopt.compressor.workspace import Workspace
from memopt.errors import ContentError, OutputError, SizeMismatchError
from memopt.manifests.file_roles import LEDGER_NAME
from memopt.manifests.release_description import RELEASE_NAME
from memopt.manifests.safetensors_header import read_header


def balance(
    job: Job, workspace: Workspace, errors_by_unit: Mapping[int, ErrorsByRole], sizes: Mapping[str, int]
) -> dict[str, ErrorSummary]:
    """Close the finished run in `workspace`; the error figures by role. ContentError, SizeMismatchError."""
    errors: ErrorsByRole = {}
    for unit in job.units:
        remedy = f"keep other programs from {workspace.out} and run the same command again: it is done anew"
        require_headers(workspace.out, unit, remedy)
        for role, figures in sorted(errors_by_unit[unit.number].items()):
            errors[role] = errors.get(role, ErrorFigures()) + figures
    summaries = {role: figures.summary() for role, figures in errors.items()}
    state = hashlib.sha256()

    def hashed() -> Iterator[bytes]:
        for line in _ledger_lines(job, workspace):
            state.update(line)
            yield line

    workspace.write_stream(LEDGER_NAME, hashed())
    workspace.write_file(RELEASE_NAME, job.release(ledger_sha256=state.hexdigest(), errors_by_role=summaries))
    check_sizes(workspace.out, sizes)
    workspace.finish()
    return summaries


def require_headers(out: Path, unit: Unit, remedy: str) -> None:
    """ContentError unless every file of `unit` has the planned header."""
    for file in unit.files:
        header = read_header(out / file.name)
        if header.tensors != file.layout or header.metadata != file.metadata:
            raise ContentError("its header is not the planned one any more", file=file.name, remedy=remedy)


def _ledger_lines(job: Job, workspace: Workspace) -> Iterator[bytes]:
    """The whole ledger; one unit's lines at a time are in memory."""
    for unit in job.units:
        yield from workspace.unit_lines(unit)
    yield from job.tail_lines()


def check_sizes(out: Path, sizes: Mapping[str, int]) -> None:
    """SizeMismatchError unless every file of the release has exactly the planned size."""
    remedy = f"keep other programs from {out}, remove it, and run the same command again"
    for name, size_bytes in sizes.items():
        try:
            found = (out / name).stat().st_size
        except OSError:
            raise OutputError("is missing from the finished release", file=name, remedy=remedy) from None
        if found != size_bytes:
            raise SizeMismatchError(f"has {found:,} bytes, the plan gave it {size_bytes:,}", file=name, remedy=remedy)
