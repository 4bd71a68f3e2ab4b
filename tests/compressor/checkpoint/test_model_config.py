"""config.json: what is read of it, what is refused, and how it is written back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from refusals import refusal
from tiny_checkpoints import CONFIGS, tiny_config

from memopt.compressor.checkpoint.model_config import (
    CONFIG_NAME,
    MAX_CONFIG_SIZE_BYTES,
    ModelConfig,
    parse_config,
    read_config,
    render_config,
)
from memopt.errors import ConfigError

INT4 = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


def parsed(name: str) -> ModelConfig:
    return parse_config((CONFIGS / f"{name}.json").read_bytes())


def test_flat_config_is_its_own_text_table() -> None:
    config = parsed("glm-5.2-fp8")
    assert (config.model_type, config.text_path) == ("glm_moe_dsa", ())
    assert config.text is config.raw
    assert config.quantization is not None
    assert config.quantization["weight_block_size"] == [128, 128]


def test_nested_text_config_is_found_with_its_quantization() -> None:
    config = parsed("kimi-k2.6-int4")
    assert (config.model_type, config.text_path) == ("kimi_k25", ("text_config",))
    assert config.text["num_hidden_layers"] == 61
    assert config.quantization == config.text["quantization_config"]


def test_quantization_beside_a_nested_text_config_is_found_too() -> None:
    table = tiny_config("kimi-k2.6-int4")
    table["quantization_config"] = table["text_config"].pop("quantization_config")
    config = parse_config(json.dumps(table).encode())
    assert config.quantization == table["quantization_config"]


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.json")))
def test_rewriting_keeps_every_other_key_in_its_place(name: str) -> None:
    config = parsed(name)
    written = json.loads(render_config(config, INT4))
    before = json.loads(config.raw_bytes)
    for table, old in ((written, before), (written.get("text_config", {}), before.get("text_config", {}))):
        keys = [key for key in old if key != "quantization_config"]
        assert [key for key in table if key != "quantization_config"] == keys
        assert all(table[key] == old[key] for key in keys if key != "text_config")
    assert "modules_to_not_convert" not in json.dumps(written)


def test_a_stale_fp8_block_is_removed_and_the_new_one_stands_where_engines_look() -> None:
    flat = json.loads(render_config(parsed("glm-5.2-fp8"), INT4))
    assert flat["quantization_config"] == INT4
    table = tiny_config("kimi-k2.6-int4")
    table["quantization_config"] = {"quant_method": "fp8"}
    nested = json.loads(render_config(parse_config(json.dumps(table).encode()), INT4))
    assert "quantization_config" not in nested
    assert nested["text_config"]["quantization_config"] == INT4


@pytest.mark.parametrize("name", ["glm-5.2-fp8", "kimi-k2.6-int4"])
def test_the_older_name_of_the_block_is_read_and_goes_too(name: str) -> None:
    table = tiny_config(name)
    text = table.get("text_config", table)
    old = text.pop("quantization_config")
    table["compression_config"] = old
    assert parse_config(json.dumps(table).encode()).quantization == old
    # Both names: the present one counts.
    text["quantization_config"] = INT4
    text["compression_config"] = old
    config = parse_config(json.dumps(table).encode())
    assert config.quantization == INT4
    for quantization in (INT4, None):
        assert b"compression_config" not in render_config(config, quantization)


@pytest.mark.parametrize("is_tied", [False, True, None])
def test_a_rewritten_nested_config_says_whether_embeddings_are_tied(is_tied: bool | None) -> None:
    table = tiny_config("kimi-k2.6-int4", tie_word_embeddings=is_tied)
    del table["tie_word_embeddings"]
    written = json.loads(render_config(parse_config(json.dumps(table).encode()), INT4))
    assert written["text_config"]["tie_word_embeddings"] is bool(is_tied)
    assert written["tie_word_embeddings"] is bool(is_tied)
    flat = json.loads(render_config(parse_config(b'{"model_type": "glm4_moe"}'), None))
    assert flat == {"model_type": "glm4_moe"}


@pytest.mark.parametrize("name", ["glm-5.2-fp8", "kimi-k2.6-int4"])
def test_a_release_without_quantized_weights_has_no_block_at_all(name: str) -> None:
    assert b"quantization_config" not in render_config(parsed(name), None)


def test_letters_beyond_ascii_stay_themselves() -> None:
    config = parse_config('{"model_type": "glm4_moe", "note": "é 模型"}'.encode())
    assert render_config(config, None).decode() == '{\n  "model_type": "glm4_moe",\n  "note": "é 模型"\n}\n'


@pytest.mark.parametrize("value", [None, 3, True, ["glm4_moe"], {"glm4_moe": 1}])
def test_a_model_type_that_is_no_text_is_refused(value: Any) -> None:
    with refusal(ConfigError, CONFIG_NAME, "model_type"):
        parse_config(json.dumps({"model_type": value}).encode())


def test_a_missing_model_type_is_refused() -> None:
    with refusal(ConfigError, CONFIG_NAME, "model_type is missing"):
        parse_config(b"{}")


@pytest.mark.parametrize("value", [3, "fp8", [{"quant_method": "fp8"}], True, [], 0, ""])
def test_a_quantization_block_that_is_no_table_is_refused(value: Any) -> None:
    with refusal(ConfigError, CONFIG_NAME, "quantization_config must be a table"):
        parse_config(json.dumps({"model_type": "glm4_moe", "quantization_config": value}).encode())


def test_a_config_over_the_cap_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / CONFIG_NAME).open("wb") as stream:
        stream.truncate(MAX_CONFIG_SIZE_BYTES + 1)
    with refusal(ConfigError, CONFIG_NAME, "16,777,217"):
        read_config(tmp_path)


def test_an_lfs_pointer_instead_of_a_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / CONFIG_NAME).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    with refusal(ConfigError, CONFIG_NAME, "not strict JSON"):
        read_config(tmp_path)
