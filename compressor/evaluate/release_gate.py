"""quality.json and report.html in a release's folder, and whether its own recipe's gate lets it be signed."""

from __future__ import annotations

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
from memopt.compressor.evaluate.report_html import REPORT_NAME, render_report
from memopt.compressor.quality_gate import QualityGate
from memopt.errors import ContentError, MalformedError, OutputError, QualityFileError, QualityGateError
from memopt.manifests.file_names import is_signature_name
from memopt.manifests.file_roles import LEDGER_NAME
from memopt.manifests.release_description import RELEASE_NAME
from memopt.manifests.strict_json import parse_json_object, read_capped

MAX_RELEASE_SIZE_BYTES = 64 * 2**20


def gate_of(folder: Path) -> QualityGate | None:
    """The gate of the recipe that release.json holds; None if it sets none. MalformedError for a broken one."""
    recipe = _release_table(folder).get("recipe")
    table = recipe.get("gate") if isinstance(recipe, dict) else None
    if table is None:
        return None
    try:
        return QualityGate.model_validate(table)
    except ValidationError as problem:
        first = problem.errors()[0]
        raise MalformedError(f"recipe.gate: {first['msg']}", file=RELEASE_NAME, remedy="compress again") from None


def refuse_signed(folder: Path) -> None:
    """OutputError if the release is signed: a file that is added now would break the signature."""
    signed = sorted(path.name for path in folder.iterdir() if is_signature_name(path.name))
    if signed:
        raise OutputError(
            f"is signed already ({signed[0]}); quality.json is part of what is signed",
            file=str(folder),
            remedy="evaluate before signing, or with --no-write",
        )


def write_quality(folder: Path, quality: Quality) -> tuple[GateCheck, ...]:
    """Write quality.json and report.html into the release; the checks of its gate, none without a gate.

    The gate is not enforced here: what failed can be read in the report. OutputError for a signed release.
    """
    refuse_signed(folder)
    gate = gate_of(folder)
    checks = () if gate is None else check_gate(gate, quality)
    figures = release_figures(folder)
    for name, raw in ((QUALITY_NAME, render_quality(quality)), (REPORT_NAME, render_report(quality, figures, checks))):
        write_atomically(folder / name, raw, folder / f".{name}.partial")
    return checks


def release_figures(folder: Path) -> LedgerFigures:
    """`ledger_figures` of the release's ledger."""
    with open(folder / LEDGER_NAME, "rb") as stream:
        return ledger_figures(stream)


def require_release_gate(folder: Path) -> tuple[GateCheck, ...]:
    """Every check of the release's gate; to be called before it is signed. Nothing is required without a gate, nor
    of a folder that memopt did not make.

    QualityGateError (exit code 5) when quality.json is missing or a limit does not hold, ContentError when it was
    measured on other weights, QualityFileError when it is malformed.
    """
    gate = gate_of(folder) if (folder / RELEASE_NAME).is_file() else None
    if gate is None:
        return ()
    if not (folder / QUALITY_NAME).is_file():
        raise QualityGateError(
            "its recipe sets a quality gate, and there is no quality.json",
            file=str(folder),
            remedy="run memopt evaluate BASE RELEASE --data text.jsonl first",
        )
    quality = parse_quality(read_capped(folder / QUALITY_NAME, MAX_QUALITY_SIZE_BYTES, QualityFileError))
    ledger = _release_table(folder).get("ledger")
    if not isinstance(ledger, dict) or ledger.get("sha256") != quality.release.sha256:
        raise ContentError(
            "was measured on other weights than this release's ledger names", file=QUALITY_NAME, remedy="evaluate again"
        )
    return require_gate(gate, quality)


def _release_table(folder: Path) -> dict[str, Any]:
    raw = read_capped(folder / RELEASE_NAME, MAX_RELEASE_SIZE_BYTES, MalformedError)
    return parse_json_object(raw, RELEASE_NAME, MalformedError)
