"""What makes two runs the same run: source headers, recipe, options and version, in one digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict

from memopt.compressor.plan import Plan
from memopt.compressor.quantize.rounding_rule import rounding_rule
from memopt.compressor.ranks.layout import Layouts
from memopt.compressor.release_file import render_release
from memopt.version import __version__


def plan_fingerprint(plan: Plan) -> str:
    """SHA-256 (hex) over everything that the output's bytes follow from, but the weights and the layouts.

    A release and its ranks are the same weights: `memopt shard` and `memopt merge` keep the fingerprint.

    All that release.json prints is covered by rendering it without results: files left behind and the versions of
    libraries too. Weights are covered while they are read: a file that is touched is refused, a resumed run compares
    the digests of what finished units read (resume.py), and a finished release is compared whole (complete.py).
    """
    plan = plan.with_layouts(Layouts())
    options = asdict(plan.options)
    for of_layouts in ("tensor_parallel", "expert_parallel", "layout"):
        del options[of_layouts]
    if plan.options.calibration is None:
        del options["calibration"]
    identity = {
        "version": __version__,
        "files": {name: [file.size_bytes, file.header_sha256] for name, file in sorted(plan.source.files.items())},
        "source": asdict(plan.identity),
        "config_sha256": hashlib.sha256(plan.source.config.raw_bytes).hexdigest(),
        "rounding": rounding_rule(),
        "recipe": plan.recipe.model_dump(mode="json"),
        "options": options,
        "small_files": [[file.name, file.size_bytes, file.sha256] for file in plan.small_files],
        "units": [hashlib.sha256(unit.hub_file.header).hexdigest() for unit in plan.units],
        "release_sha256": hashlib.sha256(render_release(plan)).hexdigest(),
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def run_fingerprint(plan_fingerprint: str, layouts: Sequence[str]) -> str:
    """What tells a run and its finished release from others: the plan's fingerprint, and the layouts that it writes."""
    return hashlib.sha256(json.dumps([plan_fingerprint, *layouts]).encode()).hexdigest()
