"""`memopt.inspect`: the whole picture from headers alone, in seconds, with every problem named."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from refusals import refusal
from tiny_checkpoints import CONFIGS, NAMES, TINY_GLM5, make_checkpoint
from tiny_plans import published

import memopt
from memopt.errors import ConfigError, UnsupportedError, UsageError
from memopt.manifests.safetensors_header import TensorHeader, render_header

NUM_SHARDS = 142


def write_sparse(folder: Path, name: str) -> Path:
    """A published checkpoint of NUM_SHARDS shards: true headers, and holes where the weights would be."""
    tensors = list(published(name).tensors.values())
    folder.mkdir()
    weight_map: dict[str, str] = {}
    step = -(-len(tensors) // NUM_SHARDS)
    for number in range(NUM_SHARDS):
        file = f"model-{number + 1:05d}-of-{NUM_SHARDS:05d}.safetensors"
        layout: list[TensorHeader] = []
        position = 0
        for tensor in tensors[number * step : (number + 1) * step]:
            end = position + tensor.size_bytes
            layout.append(TensorHeader(tensor.name, tensor.dtype, tensor.shape, position, end))
            weight_map[tensor.name] = file
            position = end
        header = render_header(layout, {"format": "pt"})
        (folder / file).write_bytes(header)
        os.truncate(folder / file, len(header) + position)
    (folder / "config.json").write_bytes((CONFIGS / f"{name}.json").read_bytes())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_glm_5_2_of_142_shards_is_inspected_in_seconds(tmp_path: Path) -> None:
    folder = write_sparse(tmp_path / "GLM-5.2-FP8", "glm-5.2-fp8")
    assert sum(path.stat().st_size for path in folder.iterdir()) > 755e9
    started = time.monotonic()
    found = memopt.inspect(folder)
    seconds = time.monotonic() - started
    assert seconds < 10, f"{seconds:.1f} s"
    assert found.problems == ()
    assert (found.num_files, found.num_stored_tensors, found.num_elements) == (142, 118_629, 753_375_793_584)
    assert f"{found.size_bytes / 2**30:.1f}" == "703.7"
    assert (found.family, found.architecture) == ("glm_moe_dsa", "GlmMoeDsaForCausalLM")
    assert (found.num_layers, found.num_mtp_layers) == (78, 1)
    assert found.tensor_parallel_degrees == (1, 2, 4, 8, 16)
    assert found.suggested_recipe == "glm-5.2-int4"
    rows = {(row.role, row.format): row for row in found.roles}
    experts = rows["routed_expert", "fp8-block 128x128"]
    assert (experts.num_tensors, experts.num_weights) == (58_368, 58_368 * 2048 * 6144)
    assert experts.size_bytes == 58_368 * (2048 * 6144 + 16 * 48 * 4)
    assert rows["router", "BF16"].num_tensors == rows["router_bias", "F32"].num_tensors == 76
    assert rows["indexer", "fp8-block 128x128"].num_tensors == 22 * 2
    assert rows["kv_b", "fp8-block 128x128"].num_tensors == 79
    assert sum(row.num_tensors for row in found.roles) == 59_585
    assert sum(row.size_bytes for row in found.roles) == found.size_bytes
    assert sum(row.num_weights for row in found.roles) == found.num_weights


def test_the_trained_example() -> None:
    found = memopt.inspect(TINY_GLM5)
    assert found.problems == ()
    assert (found.family, found.num_files, found.num_layers, found.num_mtp_layers) == ("glm_moe_dsa", 3, 5, 1)
    assert found.repository is None
    assert found.commit is None


@pytest.mark.parametrize(
    ("name", "form", "suggested"),
    [
        ("glm-5.2-fp8", "fp8-block 128x128", "glm-5.2-int4"),
        ("glm-4.7-fp8", "fp8-channel", "glm-4.7-int4"),
        ("kimi-k2-instruct-fp8", "fp8-block 128x128", "kimi-k2-int4"),
        ("deepseek-v3-fp8", "fp8-block 128x128", "kimi-k2-int4"),
        ("kimi-k2.6-int4", "int4 group 32", "kimi-k2.6"),
    ],
)
def test_format_of_the_experts_and_the_recipe_for_them(name: str, form: str, suggested: str, tmp_path: Path) -> None:
    found = memopt.inspect(make_checkpoint(tmp_path / name, name))
    assert {row.format for row in found.roles if row.role == "routed_expert"} == {form}
    assert found.suggested_recipe == suggested
    assert found.problems == ()


def test_a_release_is_a_checkpoint_too(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "glm-5.2-fp8")
    memopt.compress(source, tmp_path / "release", recipe="glm-5.2-int4")
    found = memopt.inspect(tmp_path / "release")
    assert found.problems == ()
    assert {row.format for row in found.roles if row.role == "routed_expert"} == {"int4 group 32"}
    assert found.suggested_recipe == "dequantize"


def test_problems_of_files_come_before_those_of_tensors(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "checkpoint", "glm-4.7-fp8")
    second = folder / "model-00002-of-000002.safetensors"
    os.truncate(second, second.stat().st_size - 3)
    found = memopt.inspect(folder)
    (problem,) = found.problems
    assert problem.code == "MEMOPT_TRUNCATED"
    assert second.name in problem.message
    assert found.suggested_recipe is None
    assert found.num_files == 1


def test_problems_of_tensors_are_all_listed(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "checkpoint", "glm-4.7-fp8")
    table = json.loads((folder / "config.json").read_text())
    table["num_hidden_layers"] = 2
    (folder / "config.json").write_text(json.dumps(table))
    found = memopt.inspect(folder)
    codes = {problem.code for problem in found.problems}
    assert codes == {"MEMOPT_UNKNOWN_TENSOR", "MEMOPT_MISSING_TENSOR"}
    unknown = [problem for problem in found.problems if problem.code == "MEMOPT_UNKNOWN_TENSOR"]
    assert all("model.layers.3." in problem.message for problem in unknown)


def test_a_config_that_tells_of_other_formats_is_a_problem(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "glm-5.2-fp8", quantization_config=None)
    quantized = make_checkpoint(tmp_path / "fp8", "glm-5.2-fp8")
    tables = [json.loads((folder / "config.json").read_text()) for folder in (plain, quantized)]
    for folder, table in zip((plain, quantized), reversed(tables), strict=True):
        (folder / "config.json").write_text(json.dumps(table))
    for folder, words in (
        (plain, "declares FP8 weights, the files hold none"),
        (quantized, "declares no quantized weights, the files hold FP8"),
    ):
        found = memopt.inspect(folder)
        (problem,) = found.problems
        assert problem.code == "MEMOPT_CONFIG"
        assert words in problem.message
        assert found.suggested_recipe == "glm-5.2-int4"


@pytest.mark.parametrize("name", NAMES)
def test_degrees_that_divide(name: str, tmp_path: Path) -> None:
    found = memopt.inspect(make_checkpoint(tmp_path / name, name))
    # Eight heads of a few rows: FP8 blocks of 128 allow less than channels and BF16 do.
    expected = {"glm-4.7-fp8": (1, 2, 4, 8), "kimi-k2.6-int4": (1, 2, 4, 8)}
    assert found.tensor_parallel_degrees == expected.get(name, (1,))


def test_what_cannot_be_understood_is_raised(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "checkpoint", "glm-4.7-fp8")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    with refusal(UnsupportedError, "config.json", "'llama'", "glm4_moe"):
        memopt.inspect(folder)
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": "many"}))
    with refusal(ConfigError, "config.json", "vocab_size"):
        memopt.inspect(folder)
    with refusal(UsageError, "absent", "no checkpoint folder"):
        memopt.inspect(tmp_path / "absent")


@pytest.mark.parametrize("architectures", [None, [], "x", [3], {}])
def test_odd_architectures_do_no_harm(architectures: object, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "checkpoint", "glm-4.7-fp8", architectures=architectures)
    assert memopt.inspect(folder).architecture is None
