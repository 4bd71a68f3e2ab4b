"""GLM-5.x: which layers own an indexer, and what happens when a shared layer has one all the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from refusals import assert_refusal, refusal
from tiny_checkpoints import CONFIGS
from tiny_plans import published, scan, specs_of, tiny, with_tensor, without_tensor

from memopt.compressor.checkpoint.model_config import parse_config
from memopt.compressor.families.glm_moe_dsa import has_indexer
from memopt.compressor.families.text_config import parse_text_config
from memopt.errors import ConfigError, MissingTensorError, UnknownTensorError

# The 21 layers of GLM-5.2 that own an indexer, and its MTP layer.
FULL_LAYERS = [0, 1, 2, *range(6, 78, 4), 78]
SHARED = "model.layers.2.self_attn.indexer.wk.weight"


def layers_with_indexer(name: str, **changes: Any) -> list[int]:
    specs = specs_of(tiny(name, **changes))
    return [spec.layer for spec in specs.values() if spec.name.endswith("indexer.wk.weight") and spec.layer is not None]


def test_glm_5_2_has_21_indexers_and_the_mtp_layers() -> None:
    names = published("glm-5.2-fp8").tensors
    assert [n for n in range(79) if f"model.layers.{n}.self_attn.indexer.wk.weight" in names] == FULL_LAYERS
    assert not any(".layers.3.self_attn.indexer" in name for name in names)


def test_the_frequency_gives_the_same_layers_as_the_list() -> None:
    table = json.loads((CONFIGS / "glm-5.2-fp8.json").read_text())
    listed = parse_text_config(parse_config(json.dumps(table).encode()))
    del table["indexer_types"]
    computed = parse_text_config(parse_config(json.dumps(table).encode()))
    assert [has_indexer(n, computed) for n in range(79)] == [has_indexer(n, listed) for n in range(79)]
    assert [n for n in range(79) if has_indexer(n, computed)] == FULL_LAYERS


def test_without_an_offset_it_is_two() -> None:
    layers = layers_with_indexer(
        "glm-5.2-fp8", indexer_types=None, index_skip_topk_offset=None, num_hidden_layers=10, index_topk_freq=4
    )
    assert layers == [0, 1, 5, 9, 10]


def test_without_list_and_frequency_every_layer_has_one() -> None:
    assert layers_with_indexer("glm-5.1-fp8") == [0, 1, 2, 3]


def test_an_indexer_in_a_shared_layer_is_an_unknown_tensor() -> None:
    checkpoint = tiny("glm-5.2-fp8")
    assert SHARED not in checkpoint.tensors
    (problem,) = scan(with_tensor(checkpoint, SHARED, "BF16", (32, 256))).problems
    assert_refusal(problem, UnknownTensorError, SHARED, "model.safetensors", "glm_moe_dsa does not know it")


def test_a_full_layer_without_its_indexer_is_missing_tensors() -> None:
    name = "model.layers.1.self_attn.indexer.weights_proj.weight"
    (problem,) = scan(without_tensor(tiny("glm-5.2-fp8"), name)).problems
    assert_refusal(problem, MissingTensorError, name, "glm_moe_dsa expects it", "indexer_weights")


@pytest.mark.parametrize("types", [["full", "full"], ["full", "full", "half"], []])
def test_a_list_that_does_not_fit_the_layers_is_refused(types: list[str]) -> None:
    with refusal(ConfigError, "config.json", "indexer_types", "3 entries"):
        tiny("glm-5.2-fp8", indexer_types=types)
