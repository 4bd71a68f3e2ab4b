"""config.json to a model's figures: the published files, older spellings, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoints import CONFIGS, NAMES, tiny_config

from memopt.errors import ConfigError, UnsupportedError
from memopt.manifests.strict_json import parse_json_object
from memopt.runtime.model.config_file import parse_model_config
from memopt.runtime.model.model_config import GqaConfig, MlaConfig, RopeConfig, YarnConfig


def published(name: str) -> dict[str, Any]:
    return parse_json_object((CONFIGS / f"{name}.json").read_bytes(), name, ConfigError)


def test_glm_5_2() -> None:
    config = parse_model_config(published("glm-5.2-fp8"))
    assert (config.family, config.num_layers, config.num_mtp_layers, config.num_dense_layers) == (
        "glm_moe_dsa",
        78,
        1,
        3,
    )
    assert (config.hidden_size, config.vocab_size, config.max_tokens) == (6144, 154880, 1048576)
    attention = config.attention
    assert isinstance(attention, MlaConfig)
    assert attention.indexer is not None
    full = [layer for layer, owns in enumerate(attention.indexer.layers_with_indexer) if owns]
    assert full == [0, 1, *range(2, 78, 4)]
    assert config.has_indexer(78)  # the MTP layer
    assert not config.has_indexer(3)
    assert attention.softmax_scale == 256**-0.5
    assert config.rope == RopeConfig(8e6, 64, is_interleaved=True)
    assert config.moe.routed_scaling_factor == 2.5


def test_indexers_by_frequency_and_by_pattern() -> None:
    table = published("glm-5.2-fp8")
    expected = parse_model_config(table).attention
    del table["indexer_types"]
    assert parse_model_config(table).attention == expected
    pattern = "".join("F" if owns else "S" for owns in expected.indexer.layers_with_indexer)  # type: ignore[union-attr]
    table |= {"index_topk_pattern": pattern, "index_topk_freq": 7}
    assert parse_model_config(table).attention == expected
    table |= {"index_topk_pattern": None, "index_topk_freq": None}
    every = parse_model_config(table).attention
    assert isinstance(every, MlaConfig)
    assert every.indexer is not None
    assert all(every.indexer.layers_with_indexer)


def test_kimi_k2_has_yarn_in_angles_and_scale() -> None:
    config = parse_model_config(published("kimi-k2-instruct-fp8"))
    assert config.rope == RopeConfig(5e4, 64, True, YarnConfig(32.0, 4096, 1.0, 1.0, 1.0, 1.0))
    assert isinstance(config.attention, MlaConfig)
    assert config.attention.softmax_scale == pytest.approx(192**-0.5 * (0.1 * math.log(32) + 1) ** 2, rel=1e-12)
    assert config.attention.indexer is None
    assert config.name_prefix == ""


def test_kimi_k2_6_is_the_text_model_below() -> None:
    config = parse_model_config(published("kimi-k2.6-int4"))
    assert (config.family, config.name_prefix, config.num_layers) == ("kimi_k25", "language_model.", 61)
    assert config.rope.yarn is not None
    assert config.rope.yarn.factor == 64


def test_glm_4_7_turns_half_a_head() -> None:
    config = parse_model_config(published("glm-4.7-fp8"))
    assert config.rope == RopeConfig(1e6, 64, is_interleaved=False)
    assert config.attention == GqaConfig(96, 8, 128, has_bias=True, has_qk_norm=True, softmax_scale=128**-0.5)
    table = published("glm-4.7-fp8")
    table["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 1.0}
    assert parse_model_config(table).rope == RopeConfig(5e5, 128, is_interleaved=False)
    del table["rope_parameters"], table["partial_rotary_factor"]
    assert parse_model_config(table).rope.size == 64  # transformers' default for this family


@pytest.mark.parametrize("name", NAMES)
def test_null_counts_as_missing(name: str) -> None:
    config = tiny_config(name)
    expected = parse_model_config(config)
    table = config.get("text_config", config)
    for field in (
        "n_shared_experts",
        "num_nextn_predict_layers",
        "eos_token_id",
        "tie_word_embeddings",
        "scoring_func",
    ):
        table[field] = None
    found = parse_model_config(config)
    assert (found.moe.num_shared_experts, found.num_mtp_layers, found.eos_token_ids) == (0, 0, ())
    assert found.attention == expected.attention


@pytest.mark.parametrize(("ids", "expected"), [(7, (7,)), ([1, 2], (1, 2)), (None, ())], ids=["one", "several", "none"])
def test_end_of_sequence(ids: Any, expected: tuple[int, ...]) -> None:
    assert parse_model_config(tiny_config("glm-5.2-fp8") | {"eos_token_id": ids}).eos_token_ids == expected
    nested = tiny_config("kimi-k2.6-int4") | {"eos_token_id": ids}
    assert parse_model_config(nested).eos_token_ids == expected


REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
    "first_k_dense_replace", "num_attention_heads", "num_key_value_heads", "n_routed_experts", "num_experts_per_tok",
    "norm_topk_prob", "routed_scaling_factor", "rms_norm_eps", "max_position_embeddings",
)  # fmt: skip


@given(name=st.sampled_from(NAMES), field=st.sampled_from(REQUIRED), bad=st.sampled_from([None, -1, "3", 1.5, [], {}]))
def test_a_field_that_is_missing_or_wrong_is_named(name: str, field: str, bad: Any) -> None:
    if bad == 1.5 and field in {"routed_scaling_factor", "rms_norm_eps"}:
        return
    with pytest.raises(ConfigError, match=field):
        parse_model_config(tiny_config(name, **{field: bad}))


@pytest.mark.parametrize(
    ("changes", "error", "part"),
    [
        ({"model_type": "llama"}, UnsupportedError, "llama"),
        ({"model_type": 3}, ConfigError, "model_type"),
        ({"hidden_act": "gelu"}, UnsupportedError, "hidden_act"),
        ({"scoring_func": "softmax"}, UnsupportedError, "scoring_func"),
        ({"attention_bias": True}, UnsupportedError, "attention_bias"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, UnsupportedError, "llama3"),
        ({"rope_parameters": None}, ConfigError, "rope_theta"),
        ({"n_group": 3}, ConfigError, "n_group"),
        ({"n_group": 4, "topk_group": 2}, ConfigError, "one expert a group"),
        ({"num_experts_per_tok": 5}, ConfigError, "num_experts_per_tok"),
        ({"indexer_types": ["full"]}, ConfigError, "indexer_types"),
        ({"indexer_types": ["shared", "full", "full"]}, ConfigError, "full first"),
        ({"mlp_layer_types": ["sparse", "dense", "dense"]}, UnsupportedError, "mlp_layer_types"),
        ({"num_nextn_predict_layers": 10**9}, ConfigError, "num_hidden_layers"),
        ({"qk_rope_head_dim": 15}, ConfigError, "pairs"),
        ({"index_topk": None}, ConfigError, "index_topk"),
        ({"index_n_heads": 65}, UnsupportedError, "index_n_heads is 65"),
        ({"num_experts": 5}, ConfigError, "num_experts is 5, but n_routed_experts 4"),
        ({"topk_method": "greedy"}, UnsupportedError, "topk_method"),
        ({"moe_layer_freq": 2}, UnsupportedError, "moe_layer_freq"),
        ({"mlp_bias": True}, UnsupportedError, "mlp_bias"),
        ({"partial_rotary_factor": 0.5}, UnsupportedError, "partial_rotary_factor"),
        ({"text_config": {"hidden_size": 8}}, UnsupportedError, "text_config"),
        ({"q_lora_rank": None}, ConfigError, "q_lora_rank"),
    ],
)
def test_refusals(changes: dict[str, Any], error: type[Exception], part: str) -> None:
    table = tiny_config("glm-5.2-fp8") | changes
    with pytest.raises(error, match=part):
        parse_model_config({field: value for field, value in table.items() if value is not None})


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("changes", [{"attention_factor": 1.2}, {"truncate": False}], ids=["factor", "truncate"])
def test_yarn_that_is_not_computed(changes: dict[str, Any]) -> None:
    assert parse_model_config(tiny_config("kimi-k2-instruct-fp8", rope_scaling=YARN)).rope.yarn is not None
    with pytest.raises(UnsupportedError, match="attention_factor"):
        parse_model_config(tiny_config("kimi-k2-instruct-fp8", rope_scaling=YARN | changes))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("field", "value", "plain"),
    [
        ("sliding_window", 4096, None),
        ("use_sliding_window", True, False),
        ("final_logit_softcapping", 30.0, None),
        ("logits_scaling", 8.0, 1),
        ("mla_use_nope", True, False),
        ("swiglu_limit", 10.0, None),
        ("index_kpool", 4, 1),
        ("indexer_rope_interleave", False, True),
        ("layer_types", ["full_attention", "sliding_attention"], ["full_attention", "indexed_attention"]),
    ],
)
def test_variants_that_no_block_computes(name: str, field: str, value: Any, plain: Any) -> None:
    for accepted in (None, plain):
        table = tiny_config(name)
        table.get("text_config", table)[field] = accepted
        parse_model_config(table)
    with pytest.raises(UnsupportedError, match=field):
        parse_model_config(tiny_config(name, **{field: value}))


def test_only_interleaved_pairs_for_glm_5_and_either_for_deepseek() -> None:
    with pytest.raises(UnsupportedError, match="rope_interleave is False"):
        parse_model_config(tiny_config("glm-5.2-fp8", rope_interleave=False))
    assert not parse_model_config(tiny_config("deepseek-v3-fp8", rope_interleave=False)).rope.is_interleaved


@pytest.mark.parametrize(
    ("quantization", "part"),
    [
        ({"quant_method": "awq", "bits": 4}, "quant_method is 'awq'"),
        (
            {"quant_method": "fp8", "weight_block_size": [64, 128]},
            r"weight_block_size is \[64, 128\].*memopt dequantize",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"block_structure": "1x128"}}}},
            r"block_structure is \[1, 128\]",
        ),
    ],
)
@pytest.mark.parametrize("name", ["glm-5.2-fp8", "kimi-k2.6-int4"])
def test_quantizations_that_are_not_read(name: str, quantization: dict[str, Any], part: str) -> None:
    with pytest.raises(UnsupportedError, match=part):
        parse_model_config(tiny_config(name, quantization_config=quantization))
    with pytest.raises(UnsupportedError, match=part):
        parse_model_config(tiny_config(name) | {"quantization_config": quantization})


def test_the_block_of_older_files_is_understood() -> None:
    groups = {"g": {"weights": {"block_structure": "128x128"}}}
    quantization = {"quant_method": "compressed-tensors", "config_groups": groups}
    parse_model_config(tiny_config("glm-5.2-fp8", quantization_config=quantization))


@pytest.mark.parametrize("name", NAMES)
def test_groups_of_experts_are_guessed_for_no_deepseek(name: str) -> None:
    for missing in ("n_group", "topk_group"):
        table = tiny_config(name, **{missing: None})
        if name.startswith("glm"):
            assert parse_model_config(table) == parse_model_config(tiny_config(name))
        else:
            with pytest.raises(ConfigError, match=f"{missing} is missing"):
                parse_model_config(table)


def test_kimi_k2_5_around_another_text_model_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="'qwen3'"):
        parse_model_config(tiny_config("kimi-k2.6-int4", model_type="qwen3"))
    table = tiny_config("kimi-k2.6-int4")
    for nested in (None, {}, 3):
        with pytest.raises(ConfigError):
            parse_model_config(table | {"text_config": nested})
