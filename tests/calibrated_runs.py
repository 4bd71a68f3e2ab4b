"""Small calibrated releases: a recipe, token ids in a file, and the call that makes one of the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

import memopt
from memopt.compressor.calibration_options import CalibrationOptions
from memopt.compressor.pipeline import RunResult
from memopt.compressor.recipe import Recipe, parse_recipe

VOCAB_SIZE = 128
NUM_SAMPLES = 6
SAMPLE_TOKENS = 24
# Few enough that the experts of these models get them by their own choice.
COVERAGE_TOKENS = 8


def recipe(rules: list[dict[str, Any]], family: str = "glm_moe_dsa", **more: Any) -> Recipe:
    """A recipe of `rules`, BF16 for the rest."""
    table = {"name": "test", "description": "test", "families": [family], "rules": rules, "default": "bf16", **more}
    return parse_recipe(yaml.safe_dump(table).encode(), "test.yaml")


def experts(method: str, **more: Any) -> dict[str, Any]:
    """A rule for routed experts."""
    return {"roles": ["routed_expert"], "format": {"type": "int4", "method": method, **more}}


def write_ids(path: Path, num_tokens: int = NUM_SAMPLES * SAMPLE_TOKENS, seed: int = 0) -> Path:
    """Random token ids, one document."""
    generator = torch.Generator().manual_seed(seed)
    save_file({"ids": torch.randint(VOCAB_SIZE, (num_tokens,), generator=generator, dtype=torch.int32)}, path)
    return path


def options(data: Path, **more: Any) -> CalibrationOptions:
    """Small enough for a test."""
    return CalibrationOptions(
        **{
            "data": data,
            "num_samples": NUM_SAMPLES,
            "sample_tokens": SAMPLE_TOKENS,
            "coverage_tokens": COVERAGE_TOKENS,
            "device": "cpu",
            **more,
        }
    )


def compress(source: Path, out: Path, recipe: Recipe, calibration: CalibrationOptions, **more: Any) -> RunResult:
    """On the CPU."""
    return memopt.compress(source, out, recipe=recipe, calibration=calibration, device="cpu", **more)


def weight_bytes(folder: Path) -> dict[str, bytes]:
    """Bytes of every file of a release but release.json's, by name below it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def ledger_errors(folder: Path) -> dict[str, dict[str, float]]:
    """The error figures of every quantized tensor, by its logical name."""
    rows = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    return {row["tensor"]: row["error"] for row in rows if "error" in row}
