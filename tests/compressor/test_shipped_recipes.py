"""Every shipped recipe, run on a tiny checkpoint of its family, stores each role in the format that it promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_checkpoints import make_checkpoint

import memopt
from memopt.compressor.checkpoint.model_config import ModelConfig, read_config
from memopt.compressor.families.registry import family_of
from memopt.compressor.families.text_config import parse_text_config
from memopt.compressor.recipe import load_recipe, shipped_recipe_names
from memopt.manifests.safetensors_header import read_header

# What may stand in the headers for one weight: the suffixes of its tensors, with their types.
INT4 = {".weight_packed": "I32", ".weight_scale": "BF16", ".weight_shape": "I64"}
FP8_BLOCK = {".weight": "F8_E4M3", ".weight_scale_inv": "F32"}
FP8_MIXED = {".weight": "F8_E4M3", ".weight_scale": "F32"}
BF16 = {".weight": "BF16"}
# What a publisher or a recipe may quantize besides the routed experts; every other tensor is BF16, the router bias F32.
QUANTIZABLE = {"attention", "kv_b", "indexer", "dense_mlp", "shared_expert"}
SMALLEST_VOCABULARY = 64
VISION = {"vision_tower.encoder.blocks.0.wqkv.weight": "BF16", "mm_projector.proj.weight": "BF16"}

# Recipe: checkpoint, tensor-parallel degree, form of the routed experts, form of every other Linear, block's format.
CASES: dict[str, tuple[str, int, dict[str, str], dict[str, str], str | None]] = {
    "glm-5.2-int4": ("glm-5.2-fp8", 8, INT4, BF16, "pack-quantized"),
    "glm-5.2-int4-gptq": ("glm-5.2-fp8", 8, INT4, BF16, "pack-quantized"),
    "glm-5.2-int4-fp8": ("glm-5.2-fp8", 1, INT4, FP8_MIXED, "mixed-precision"),
    "glm-5.1-int4": ("glm-5.1-fp8", 8, INT4, BF16, "pack-quantized"),
    "glm-4.7-int4": ("glm-4.7-fp8", 8, INT4, BF16, "pack-quantized"),
    "kimi-k2-int4": ("kimi-k2-instruct-fp8", 8, INT4, BF16, "pack-quantized"),
    "kimi-k2.6": ("kimi-k2.6-int4", 8, INT4, BF16, "pack-quantized"),
    "copy": ("deepseek-v3-fp8", 1, FP8_BLOCK, FP8_BLOCK, "fp8"),
    "dequantize": ("kimi-k2.6-int4", 1, BF16, BF16, None),
}


def stored_types(folder: Path) -> dict[str, str]:
    """Name -> dtype of every tensor, from the output's headers."""
    return {t.name: t.dtype for file in folder.glob("*.safetensors") for t in read_header(file).tensors}


def expected_types(config: ModelConfig, experts: dict[str, str], others: dict[str, str]) -> dict[str, str]:
    """The same as the family and the case have it."""
    expected: dict[str, str] = dict(VISION) if config.model_type == "kimi_k25" else {}
    for spec in family_of(config).expected(parse_text_config(config)):
        role = str(spec.role)
        if role == "routed_expert" or role in QUANTIZABLE:
            form = experts if role == "routed_expert" else others
            expected |= {spec.name.removesuffix(".weight") + suffix: dtype for suffix, dtype in form.items()}
        else:
            expected[spec.name] = "F32" if role == "router_bias" else "BF16"
    return expected


def quantization_of(folder: Path) -> dict[str, Any] | None:
    config = json.loads((folder / "config.json").read_text())
    block: dict[str, Any] | None = config.get("text_config", config).get("quantization_config")
    return block


def calibration_of(recipe: str, folder: Path) -> memopt.CalibrationOptions | None:
    """Data for a recipe that needs it: token ids, enough for every expert of a tiny checkpoint."""
    if not load_recipe(recipe).needs_calibration:
        return None
    ids = torch.randint(0, SMALLEST_VOCABULARY, (16, 32), generator=torch.Generator().manual_seed(1))
    save_file({"ids": ids}, folder / "ids.safetensors")
    return memopt.CalibrationOptions(
        folder / "ids.safetensors", num_samples=16, sample_tokens=32, coverage_tokens=32, device="cpu"
    )


def test_every_shipped_recipe_has_a_case() -> None:
    assert set(CASES) == set(shipped_recipe_names())


@pytest.mark.parametrize("recipe", sorted(CASES))
def test_every_role_is_stored_as_the_recipe_says(recipe: str, tmp_path: Path) -> None:
    checkpoint, degree, experts, others, block_format = CASES[recipe]
    source, out = make_checkpoint(tmp_path / "source", checkpoint), tmp_path / "out"
    options = memopt.PlanOptions(tensor_parallel=degree)
    calibration = calibration_of(recipe, tmp_path)
    memopt.compress(source, out, recipe=recipe, options=options, workers=2, device="cpu", calibration=calibration)
    assert stored_types(out) == expected_types(read_config(source), experts, others)
    block = quantization_of(out)
    assert (block and block.get("format", block["quant_method"])) == block_format
    assert memopt.inspect(out).problems == ()
    rounded = [t for t in memopt.plan(source, recipe, options=options).tensors if t.int4 is not None]
    assert {(t.int4.group_size, t.int4.scale, t.int4.norm) for t in rounded if t.int4} == (
        {(32, "mse-signed", "2")} if experts is INT4 and recipe != "kimi-k2.6" else set()
    )
