"""release.json: what a release is made of, from what, and how. No time, host or path is in it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from typing import Any

from memopt.compressor.ledger import UNKNOWN_DIGEST, ErrorFigures, ErrorSummary, fixed_width
from memopt.compressor.plan import Plan
from memopt.compressor.quantize.rounding_rule import rounding_rule
from memopt.compressor.tensor_plan import Fate
from memopt.errors import ContentError
from memopt.manifests.file_roles import LEDGER_NAME
from memopt.manifests.release_description import RELEASE_NAME
from memopt.version import __version__

FORMAT_VERSION = 1
_LIBRARIES = ("numba", "numpy")
# What a calibrated release follows from as well.
_CALIBRATION_LIBRARIES = (*_LIBRARIES, "torch")
# A figure while the table is one of Python: json would print a float in another width.
_FIGURE_TOKEN = "\x00figure {}\x00"
_TOKEN_IN_JSON = re.compile(r'"\\u0000figure ([0-9.e+-]+)\\u0000"')


def figure_token(value: float) -> str:
    """What stands for a figure in a table for `render_table`."""
    return _FIGURE_TOKEN.format(fixed_width(value))


def _formats_by_role(plan: Plan) -> dict[str, list[str]]:
    formats: dict[str, set[str]] = {}
    for tensor in plan.tensors:
        if tensor.outputs:
            formats.setdefault(str(tensor.source.spec.role), set()).add(tensor.output_format)
    return {role: sorted(values) for role, values in sorted(formats.items())}


def _source(plan: Plan) -> dict[str, Any]:
    identity = plan.identity
    published = dict(identity.file_sha256)
    files: list[dict[str, Any]] = []
    for name, file in sorted(plan.source.files.items()):
        row: dict[str, Any] = {"name": name, "size_bytes": file.size_bytes, "header_sha256": file.header_sha256}
        if name in published:
            row["sha256"] = published[name]
        files.append(row)
    return {
        "kind": identity.kind,
        "repository": identity.repository,
        "commit": identity.commit,
        "tensors": len(plan.source.tensors),
        "size_bytes": plan.source.size_bytes,
        "files": files,
    }


def _kv_cache(plan: Plan) -> str:
    choice = plan.recipe.kv_cache
    return "chosen at run time" if choice is None else f"{choice.format}, {choice.scales} scales"


def stages(plan: Plan) -> list[str]:
    """What the weights are meant for (docs/design.md, "Words"): INT4 for decode, FP8 or BF16 for prefill."""
    return ["decode" if any(tensor.is_int4 for tensor in plan.tensors) else "prefill"]


def render_release(
    plan: Plan,
    *,
    fingerprint: str = UNKNOWN_DIGEST,
    ledger_sha256: str = UNKNOWN_DIGEST,
    errors_by_role: Mapping[str, ErrorSummary] | None = None,
) -> bytes:
    """release.json's bytes. What is not given is a placeholder of the same width.

    `fingerprint`: hex, see `plan_fingerprint`, which covers everything else that is printed here but the results.
    """
    errors_by_role = errors_by_role or {}
    nothing = ErrorFigures().summary()
    quantized_roles = sorted({str(t.source.spec.role) for t in plan.tensors if t.fate is Fate.QUANTIZED})
    calibration = plan.options.calibration
    libraries = _LIBRARIES if calibration is None else _CALIBRATION_LIBRARIES
    table = {
        "format_version": FORMAT_VERSION,
        "identity": {
            "name": plan.options.release_name or plan.recipe.name,
            "family": plan.family,
            "plan_fingerprint": fingerprint,
        },
        "source": _source(plan),
        "recipe": plan.recipe.model_dump(mode="json"),
        "tool": {"memopt": __version__, **{name: metadata.version(name) for name in libraries}},
        "formats": {"weights": _formats_by_role(plan), "kv_cache": _kv_cache(plan)},
        "stages": stages(plan),
        "rounding": rounding_rule() if quantized_roles else None,
        **({} if calibration is None else {"calibration": calibration.table()}),
        "totals": {
            "fates": {str(fate): count for fate, count in plan.fate_counts.items()},
            "tensors": sum(len(unit.layout) for unit in plan.units),
            "files": len(plan.units),
            "weights_size_bytes": plan.weights_size_bytes,
            "error": {
                role: {
                    "relative_mse": figure_token(errors_by_role.get(role, nothing).relative_mse),
                    "max_error": figure_token(errors_by_role.get(role, nothing).max_error),
                    "clipped_share": figure_token(errors_by_role.get(role, nothing).clipped_share),
                }
                for role in quantized_roles
            },
        },
        "ledger": {"file": LEDGER_NAME, "sha256": ledger_sha256},
        "layouts": list(plan.layouts.names),
        "engine_notes": [asdict(note) for note in plan.notes],
        "not_copied": [asdict(skipped) for skipped in plan.skipped_files],
        "code_files": [file.name for file in plan.metadata.copied if file.name.endswith(".py")],
    }
    return render_table(table)


def render_table(table: Mapping[str, Any]) -> bytes:
    """release.json's bytes from its table, whose figures are `figure_token`s."""
    text = json.dumps(table, indent=2, ensure_ascii=False) + "\n"
    return _TOKEN_IN_JSON.sub(r"\1", text).encode()


def parse_table(raw: bytes) -> dict[str, Any]:
    """The table of a release.json, figures as `figure_token`s; ContentError unless `render_table` gives `raw` back."""
    try:
        table = json.loads(raw, parse_float=lambda text: _FIGURE_TOKEN.format(text))
        is_ours = isinstance(table, dict) and render_table(table) == raw
    except (ValueError, RecursionError):
        is_ours = False
    if not is_ours:
        raise ContentError(
            "is not as memopt writes it", file=RELEASE_NAME, remedy="fetch the release again, or compress anew"
        )
    return dict(table)
