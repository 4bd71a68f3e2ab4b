"""release.json: what a release is made of, from what, and how. No time, host or path is in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from typing import Any

from memopt.compressor.ledger import UNKNOWN_DIGEST, ErrorFigures, ErrorSummary, fixed_width
from memopt.compressor.plan import Plan
from memopt.compressor.quantize.rounding_rule import rounding_rule
from memopt.compressor.tensor_plan import Fate
from memopt.manifests.file_roles import LEDGER_NAME
from memopt.version import __version__

FORMAT_VERSION = 1
_LIBRARIES = ("numba", "numpy")
_FIGURE_TOKEN = "\x00figure-{}\x00"


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
    figures: list[float] = []

    def figure(value: float) -> str:
        figures.append(value)
        return _FIGURE_TOKEN.format(len(figures) - 1)

    quantized_roles = sorted({str(t.source.spec.role) for t in plan.tensors if t.fate is Fate.QUANTIZED})
    table = {
        "format_version": FORMAT_VERSION,
        "identity": {
            "name": plan.options.release_name or plan.recipe.name,
            "family": plan.family,
            "plan_fingerprint": fingerprint,
        },
        "source": _source(plan),
        "recipe": plan.recipe.model_dump(mode="json"),
        "tool": {"memopt": __version__, **{name: metadata.version(name) for name in _LIBRARIES}},
        "formats": {"weights": _formats_by_role(plan), "kv_cache": "chosen at run time"},
        "stages": stages(plan),
        "rounding": rounding_rule() if quantized_roles else None,
        "totals": {
            "fates": {str(fate): count for fate, count in plan.fate_counts.items()},
            "tensors": sum(len(unit.layout) for unit in plan.units),
            "files": len(plan.units),
            "weights_size_bytes": plan.weights_size_bytes,
            "error": {
                role: {
                    "relative_mse": figure(errors_by_role.get(role, nothing).relative_mse),
                    "max_error": figure(errors_by_role.get(role, nothing).max_error),
                    "clipped_share": figure(errors_by_role.get(role, nothing).clipped_share),
                }
                for role in quantized_roles
            },
        },
        "ledger": {"file": LEDGER_NAME, "sha256": ledger_sha256},
        "tensor_parallel_checked": plan.tensor_parallel,
        "engine_notes": [asdict(note) for note in plan.notes],
        "not_copied": [asdict(skipped) for skipped in plan.skipped_files],
        "code_files": [file.name for file in plan.metadata.copied if file.name.endswith(".py")],
    }
    text = json.dumps(table, indent=2, ensure_ascii=False) + "\n"
    for number, value in enumerate(figures):
        text = text.replace(json.dumps(_FIGURE_TOKEN.format(number)), fixed_width(value))
    return text.encode()
