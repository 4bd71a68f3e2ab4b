"""quality.json and report.html in a release's folder, and whether its own recipe's gate lets it be signed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from memopt.compressor.checkpoint.writer import write_atomically
from memopt.compressor.evaluate.gate import GateCheck, check_gate, require_gate
from memopt.compressor.evaluate.ledger_figures import LedgerFigures, ledger_figures
from memopt.compressor.evaluate.quality import Quality
from memopt.compressor.evaluate.quality_file import (
    MAX_QUALITY_SIZE_BYTES,
    QUALITY_NAME,
    parse_quality,
    render_quality,
)
from memopt.compressor.evaluate.release_weights import read_release_weights, release_table, require_release
from memopt.compressor.evaluate.report_html import REPORT_NAME, render_report
from memopt.compressor.quality_gate import QualityGate
from memopt.errors import ContentError, DataFileError, MalformedError, OutputError, QualityFileError, QualityGateError
from memopt.manifests.file_names import is_signature_name
from memopt.manifests.file_roles import LEDGER_NAME
from memopt.manifests.release_description import RELEASE_NAME
from memopt.manifests.strict_json import read_capped


@dataclass(frozen=True, slots=True)
class EvaluatedRelease:
    """What a release that is measured says of itself: its recipe's gate, if it sets one, and its ledger's figures."""

    folder: Path
    gate: QualityGate | None
    figures: LedgerFigures

    def checks(self, quality: Quality) -> tuple[GateCheck, ...]:
        """The checks of its gate; none without a gate."""
        return () if self.gate is None else check_gate(self.gate, quality)

    def write(self, quality: Quality) -> None:
        """Write report.html, then quality.json. The gate is not enforced: what failed can be read in the report."""
        report = render_report(quality, self.figures, self.checks(quality))
        for name, raw in ((REPORT_NAME, report), (QUALITY_NAME, render_quality(quality))):
            temporary = self.folder / f".{name}.partial"
            # A link in its place would be written through.
            temporary.unlink(missing_ok=True)
            try:
                write_atomically(self.folder / name, raw, temporary)
            finally:
                # What is left in the folder would be signed.
                temporary.unlink(missing_ok=True)

    def require(self, quality: Quality) -> None:
        """QualityGateError unless every check of its gate holds."""
        if self.gate is not None:
            require_gate(self.gate, quality)


def read_evaluated_release(folder: Path) -> EvaluatedRelease:
    """Everything but the weights that evaluating `folder` needs of it, so that a fault is told before any work.

    UsageError for a folder that memopt did not make, MalformedError and LedgerError for broken files.
    """
    require_release(folder)
    gate = _gate_of(release_table(folder))
    with open(folder / LEDGER_NAME, "rb") as stream:
        return EvaluatedRelease(folder, gate, ledger_figures(stream))


def refuse_signed(folder: Path) -> None:
    """OutputError if the release is signed: a file that is added now would break the signature."""
    signed = sorted(path.name for path in folder.iterdir() if is_signature_name(path.name))
    if signed:
        raise OutputError(
            f"is signed already ({signed[0]}); quality.json is part of what is signed",
            file=str(folder),
            remedy="evaluate before signing, or with --no-write",
        )


def require_writable(folder: Path) -> None:
    """OutputError unless report.html and quality.json can be written into `folder`."""
    for path in (folder / REPORT_NAME, folder / QUALITY_NAME):
        if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
            raise OutputError("is in the way: it is no plain file", file=str(path), remedy="remove it")
    if not os.access(folder, os.W_OK):
        raise OutputError(
            "cannot be written into", file=str(folder), remedy="give yourself the right to, or use --no-write"
        )


def refuse_calibration_data(folder: Path, sha256: str, file: str) -> None:
    """DataFileError naming `file` if the release in `folder` was calibrated on it, whose digest is `sha256` (hex)."""
    calibration = release_table(folder).get("calibration")
    if isinstance(calibration, dict) and calibration.get("data_sha256") == sha256:
        raise DataFileError(
            "is what the release was calibrated on: there it loses less than elsewhere",
            file=file,
            remedy="evaluate on text that calibration never saw",
        )


def require_release_gate(folder: Path) -> tuple[GateCheck, ...]:
    """Every check of the release's gate; to be called before it is signed. Nothing is required without a gate, nor
    of a folder that memopt did not make; but a quality.json that is there must be this release's.

    QualityGateError (exit code 5) when quality.json is missing or a limit does not hold, ContentError when it was
    measured on other weights, QualityFileError when it is malformed.
    """
    if not (folder / RELEASE_NAME).is_file():
        return ()
    gate = _gate_of(release_table(folder))
    # Whatever has that name: what is no file is refused by reading it.
    if os.path.lexists(folder / QUALITY_NAME):
        quality = _own_quality(folder)
        return () if gate is None else require_gate(gate, quality)
    if gate is not None:
        raise QualityGateError(
            "its recipe sets a quality gate, and there is no quality.json",
            file=str(folder),
            remedy="run memopt evaluate BASE RELEASE --data text.jsonl first",
        )
    return ()


def _own_quality(folder: Path) -> Quality:
    """quality.json of `folder`; ContentError if it was measured on other weights than the ledger lists."""
    quality = parse_quality(read_capped(folder / QUALITY_NAME, MAX_QUALITY_SIZE_BYTES, QualityFileError))
    if read_release_weights(folder).sha256 != quality.release.sha256:
        raise ContentError(
            "was measured on other weights than this release's ledger lists", file=QUALITY_NAME, remedy="evaluate again"
        )
    return quality


def _gate_of(release: dict[str, Any]) -> QualityGate | None:
    """The gate of the recipe that release.json holds; None if it sets none. MalformedError for a broken one."""
    recipe = release.get("recipe")
    table = recipe.get("gate") if isinstance(recipe, dict) else None
    if table is None:
        return None
    try:
        return QualityGate.model_validate(table)
    except ValidationError as problem:
        first = problem.errors()[0]
        raise MalformedError(f"recipe.gate: {first['msg']}", file=RELEASE_NAME, remedy="compress again") from None
