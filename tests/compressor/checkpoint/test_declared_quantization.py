"""What config.json says of quantized weights: formats and FP8 block, in either of two spellings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from refusals import refusal
from tiny_checkpoints import NAMES, make_tensors, tiny_config, write_checkpoint
from tiny_plans import checkpoint_of, tiny

import memopt
from memopt.compressor.checkpoint.declared_quantization import declared_block, declared_formats
from memopt.compressor.checkpoint.model_config import ModelConfig, parse_config
from memopt.errors import ConfigError


def config_with(block: dict[str, Any]) -> ModelConfig:
    return parse_config(json.dumps({"model_type": "x", "quantization_config": block}).encode())


def groups(*weights: object) -> dict[str, Any]:
    tables = {f"group_{number}": {"weights": table} for number, table in enumerate(weights)}
    return {"quant_method": "compressed-tensors", "config_groups": tables}


@pytest.mark.parametrize(
    "block", [[0, 128], [128], [True, True], [128.0, 128.0], "128x128", 128, [-1, 128], [1, 2**99]]
)
def test_a_block_that_is_none_is_refused(block: object) -> None:
    config = tiny_config("glm-5.2-fp8")
    config["quantization_config"]["weight_block_size"] = block
    with refusal(ConfigError, "config.json", "weight_block_size"):
        checkpoint_of(config)
    with refusal(ConfigError, "config.json", "block_structure"):
        declared_block(config_with(groups({"num_bits": 4}, {"block_structure": block})))


def test_the_block_stands_in_either_spelling() -> None:
    assert declared_block(tiny("glm-4.7-fp8").config) == (128, 128)
    assert declared_block(config_with({"quant_method": "fp8", "weight_block_size": [64, 32]})) == (64, 32)
    assert declared_block(config_with(groups({"num_bits": 4}, {"block_structure": [64, 32]}))) == (64, 32)
    with refusal(ConfigError, "config.json", "(64, 32), (128, 128)", "at once"):
        declared_block(config_with(groups({"block_structure": [64, 32]}, {"block_structure": [128, 128]})))


@pytest.mark.parametrize("name", NAMES)
def test_published_formats(name: str) -> None:
    assert declared_formats(tiny(name).config.quantization) == {"INT4" if name.endswith("int4") else "FP8"}


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (None, set()),
        ({"quant_method": "awq"}, {"awq"}),
        (groups({"type": "int", "num_bits": 4}, {"type": "float", "num_bits": 8}), {"INT4", "FP8"}),
        (groups({"type": "int", "num_bits": 8}), {"int8"}),
        (groups(None, [4], {}, {"type": [], "num_bits": {}}), set()),
        ({"quant_method": "compressed-tensors", "config_groups": [4]}, set()),
    ],
)
def test_declared_formats(block: dict[str, Any] | None, expected: set[str]) -> None:
    assert declared_formats(block) == expected


def test_a_mixed_release_with_blocks_of_64_is_read_again(tmp_path: Path) -> None:
    config = tiny_config("glm-5.2-fp8")
    config["quantization_config"]["weight_block_size"] = [64, 32]
    source = write_checkpoint(tmp_path / "source", config, make_tensors(checkpoint_of(config)))
    options = memopt.PlanOptions(tensor_parallel=1)
    memopt.compress(source, tmp_path / "mixed", recipe="glm-5.2-int4-fp8", options=options, device="cpu")
    found = memopt.inspect(tmp_path / "mixed")
    assert found.problems == ()
    assert "fp8-block 64x32" in {row.format for row in found.roles}
    memopt.dequantize(tmp_path / "mixed", tmp_path / "export")
    memopt.dequantize(source, tmp_path / "direct")
    for folder in ("export", "direct"):
        assert memopt.inspect(tmp_path / folder).problems == ()
