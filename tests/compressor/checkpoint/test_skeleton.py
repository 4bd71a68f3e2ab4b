"""Checkpoints made from a config alone have the names, types, shapes and sizes of the published ones."""

from __future__ import annotations

import json
from math import prod
from typing import Any

import pytest
from refusals import refusal
from tiny_checkpoints import NAMES, TINY_GLM5, tiny_config
from tiny_plans import checkpoint_of, published, scan, specs_of, tiny

from memopt.compressor.checkpoint.checkpoint import open_checkpoint
from memopt.compressor.checkpoint.model_config import parse_config
from memopt.compressor.checkpoint.skeleton import published_format, skeleton_checkpoint
from memopt.compressor.checkpoint.source_tensor import SourceFormat
from memopt.errors import UnsupportedError

# Stored tensors, bytes, weights, weights without the MTP layer (docs/formats.md gives sources).
PUBLISHED = {
    "glm-5.1-fp8": (119_028, 756_162_687_872, 753_864_139_008, 743_911_218_432),
    "glm-4.7-fp8": (88_542, 362_052_508_416, 358_337_791_296, 352_797_829_024),
    "kimi-k2-instruct-fp8": (139_583, 1_029_173_249_888, 1_026_408_232_448, 1_026_408_232_448),
}


def test_glm_5_2_is_exact_to_the_element() -> None:
    checkpoint = published("glm-5.2-fp8")
    assert len(checkpoint.tensors) == 118_629
    assert sum(prod(tensor.shape) for tensor in checkpoint.tensors.values()) == 753_375_793_584
    assert checkpoint.size_bytes == 755_617_140_416
    assert f"{checkpoint.size_bytes / 2**30:.1f}" == "703.7"
    specs = specs_of(checkpoint).values()
    assert round(sum(prod(spec.shape) for spec in specs) / 1e6) == 753_330
    assert round(sum(prod(spec.shape) for spec in specs if not spec.is_mtp) / 1e6) == 743_377
    # The MTP layer in BF16 with its F32 router bias, as a publisher extracted it: exact.
    mtp = [spec for spec in specs if spec.is_mtp]
    assert len(mtp) == 791
    assert sum(prod(spec.shape) * (4 if spec.role == "router_bias" else 2) for spec in mtp) == 19_905_841_664


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_counts_and_sizes(name: str) -> None:
    checkpoint = published(name)
    specs = specs_of(checkpoint).values()
    found = (
        len(checkpoint.tensors),
        checkpoint.size_bytes,
        sum(prod(spec.shape) for spec in specs),
        sum(prod(spec.shape) for spec in specs if not spec.is_mtp),
    )
    assert found == PUBLISHED[name]


def test_the_skeleton_of_the_trained_example_is_that_checkpoint() -> None:
    real = open_checkpoint(TINY_GLM5)
    skeleton = skeleton_checkpoint(real.config)
    assert {n: (t.dtype, t.shape) for n, t in skeleton.tensors.items()} == {
        n: (t.dtype, t.shape) for n, t in real.tensors.items()
    }
    assert skeleton.folder is None


@pytest.mark.parametrize("name", NAMES)
def test_a_skeleton_lies_in_one_file_without_a_hole_and_scans_clean(name: str) -> None:
    checkpoint = tiny(name)
    position = 0
    for tensor in checkpoint.tensors.values():
        assert tensor.start == position
        position += tensor.size_bytes
    (file,) = checkpoint.files.values()
    assert file.size_bytes == position == checkpoint.size_bytes
    assert scan(checkpoint).problems == ()


def test_a_tied_head_is_not_stored_twice() -> None:
    assert "lm_head.weight" in tiny("glm-4.7-fp8").tensors
    tied = tiny("glm-4.7-fp8", tie_word_embeddings=True)
    assert "lm_head.weight" not in tied.tensors
    assert scan(tied).problems == ()


def test_a_config_without_quantization_is_bf16() -> None:
    config = tiny_config("glm-5.2-fp8", quantization_config=None)
    checkpoint = checkpoint_of(config)
    assert {tensor.dtype for tensor in checkpoint.tensors.values()} == {"BF16", "F32"}
    assert {name for name, t in checkpoint.tensors.items() if t.dtype == "F32"} == {
        f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3)
    }


def block(**weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "fp8"}, (SourceFormat.FP8_BLOCK, 0)),
        (block(type="float", num_bits=8, strategy="channel"), (SourceFormat.FP8_CHANNEL, 0)),
        (block(type="int", num_bits=4, group_size=64), (SourceFormat.INT4_PACKED, 64)),
    ],
)
def test_published_formats(quantization: dict[str, Any], expected: tuple[SourceFormat, int]) -> None:
    config = tiny_config("glm-4.7-fp8", quantization_config=quantization)
    assert published_format(parse_config(json.dumps(config).encode())) == expected


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "awq"},
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        {"quant_method": "compressed-tensors", "config_groups": []},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": None}},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": [4]}}},
        block(type="int", num_bits=8, group_size=32),
        *(block(type="int", num_bits=4, group_size=size) for size in (0, -1, 48, True, 32.0, None, "32", 10**12)),
    ],
)
def test_a_quantization_that_nobody_publishes_is_refused(quantization: dict[str, Any]) -> None:
    with refusal(UnsupportedError, "config.json", repr(quantization["quant_method"]), "known:"):
        tiny("glm-4.7-fp8", quantization_config=quantization)
