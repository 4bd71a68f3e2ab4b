"""The sizes in config.json: every missing, wrong or absurd one is named, and none costs minutes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from refusals import refusal, within_seconds
from tiny_checkpoints import CONFIGS, tiny_config
from tiny_plans import checkpoint_of, specs_of

from memopt.compressor.checkpoint.model_config import parse_config
from memopt.compressor.families.text_config import TextConfig, parse_text_config
from memopt.errors import ConfigError

NEEDED = sorted(name for name, field in TextConfig.model_fields.items() if field.is_required())
MLA = ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"]


def parse(config: dict[str, Any]) -> TextConfig:
    return parse_text_config(parse_config(json.dumps(config).encode()))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_published_configs_are_read(path: Any) -> None:
    table = json.loads(path.read_text())
    text = table.get("text_config", table)
    read = parse(table).model_dump()
    for field, value in read.items():
        if field in text and field != "indexer_types":
            assert value == text[field], field


@pytest.mark.parametrize("field", NEEDED)
def test_a_missing_size_is_named(field: str) -> None:
    for name in ("glm-4.7-fp8", "kimi-k2.6-int4"):
        with refusal(ConfigError, "config.json", field, "field required"):
            parse(tiny_config(name, **{field: None}))


@pytest.mark.parametrize("value", ["256", True, 256.0, 0.5, -1, [256], {}, 2**31 + 1, 10**400])
@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "n_routed_experts", "kv_lora_rank"])
def test_a_size_is_a_whole_number_that_is_not_absurd(field: str, value: Any) -> None:
    with within_seconds(5), refusal(ConfigError, "config.json", field):
        parse(tiny_config("glm-5.2-fp8", **{field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tie_word_embeddings", "yes"),
        ("attention_bias", 1),
        ("hidden_size", 0),
        ("num_nextn_predict_layers", -1),
        ("indexer_types", "full"),
        ("indexer_types", ["full", 3, "shared"]),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(field: str, value: Any) -> None:
    with refusal(ConfigError, "config.json", field):
        parse(tiny_config("glm-5.2-fp8", **{field: value}))


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_hidden_layers": 4097},
        {"num_nextn_predict_layers": 2**31},
        {"num_hidden_layers": 4096, "n_routed_experts": 65_536},
        {"n_routed_experts": 2**31},
    ],
)
def test_layers_and_experts_that_would_take_forever_are_refused(sizes: dict[str, int]) -> None:
    with within_seconds(5), refusal(ConfigError, "config.json", "layers", "experts", "4,096", "262,144"):
        checkpoint_of(tiny_config("glm-4.7-fp8", **sizes))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("glm-4.7-fp8", ["head_dim"]),
        ("kimi-k2-instruct-fp8", MLA),
        ("kimi-k2.6-int4", MLA),
        ("deepseek-v3-fp8", MLA),
        ("glm-5.2-fp8", [*MLA, "index_n_heads", "index_head_dim", "q_lora_rank"]),
    ],
)
def test_what_a_family_needs_is_named(name: str, fields: list[str]) -> None:
    for field in fields:
        with refusal(ConfigError, "config.json", f"{field} is missing"):
            checkpoint_of(tiny_config(name, **{field: None}))


def test_null_is_as_good_as_missing() -> None:
    table = tiny_config("deepseek-v3-fp8")
    nothing = {"n_shared_experts": None, "num_nextn_predict_layers": None, "tie_word_embeddings": None}
    text = parse(table | nothing)
    assert (text.n_shared_experts, text.num_nextn_predict_layers, text.tie_word_embeddings) == (0, 0, False)
    names = specs_of(checkpoint_of(table | nothing))
    assert not [name for name in names if "shared_experts" in name or ".layers.3." in name]
    with refusal(ConfigError, "config.json", "hidden_size", "field required"):
        parse(table | {"hidden_size": None})


def test_unknown_fields_are_left_alone() -> None:
    assert specs_of(checkpoint_of(tiny_config("glm-4.7-fp8", rope_theta="any", new_feature=[1])))
