"""The quantization block: compressed-tensors' own schema accepts it and its own matcher finds the right modules."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationStrategy
from compressed_tensors.utils.match import is_match
from refusals import refusal
from tiny_checkpoints import NAMES
from tiny_plans import INT4_EXPERTS, plan_of, recipe, source_of, tiny, with_tensor, without_tensor

from memopt.compressor.plan import Plan
from memopt.compressor.quantization_config import EXPERT_PATTERN, build_quantization_config, module_patterns
from memopt.compressor.recipe import DEFAULT_RECIPES
from memopt.compressor.tensor_plan import TensorPlan
from memopt.errors import RecipeError

CHANNEL_EXPERTS = {"roles": ["routed_expert"], "format": {"type": "int4", "group_size": "channel"}}
# vLLM's packed_modules_mapping for these families.
FUSED = {
    "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
PORTABLE_WEIGHTS = {
    "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False,
    "actorder": None, "observer": "minmax",
}  # fmt: skip


@cache
def linear_class() -> torch.nn.Module:
    return torch.nn.Linear(1, 1, bias=False)


def accepted(plan: Plan) -> tuple[dict[str, Any], QuantizationConfig]:
    """The plan's block and what compressed-tensors makes of it; it must not change its meaning."""
    assert plan.quantization is not None
    theirs = QuantizationConfig.model_validate(plan.quantization)
    assert theirs.format == plan.quantization["format"]
    assert theirs.ignore == plan.quantization["ignore"]
    return plan.quantization, theirs


def scheme_of(module: str, theirs: QuantizationConfig) -> str | None:
    """The scheme that compressed-tensors gives a Linear of this name: "4 group 32", "8 block", ... or None."""
    if any(is_match(module, linear_class(), entry, fused=FUSED) for entry in theirs.ignore or []):
        return None
    for group in theirs.config_groups.values():
        if any(is_match(module, linear_class(), target, fused=FUSED) for target in group.targets):
            weights = group.weights
            return (
                f"{weights.num_bits} {QuantizationStrategy(weights.strategy).value} {weights.group_size or ''}".strip()
            )
    return None


def assert_matches(plan: Plan, int4: str | None, float8: str | None) -> None:
    """Every Linear gets its own scheme by compressed-tensors' rules, and so do the modules that vLLM fuses."""
    _, theirs = accepted(plan)
    linear = {t.source.spec.module: t for t in plan.tensors if t.source.spec.is_linear and t.outputs}

    def expected(tensor: TensorPlan) -> str | None:
        return int4 if tensor.is_int4 else float8 if tensor.is_float8 else None

    for module, tensor in linear.items():
        assert scheme_of(module, theirs) == expected(tensor), module
        for fused, shards in FUSED.items():
            prefix = module.removesuffix(shards[0])
            if prefix != module and prefix + shards[-1] in linear:
                assert scheme_of(prefix + fused, theirs) == expected(tensor), prefix + fused


def test_golden_portable_form_of_glm_5_2() -> None:
    block, _ = accepted(plan_of(tiny("glm-5.2-fp8"), "glm-5.2-int4"))
    assert block == {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": PORTABLE_WEIGHTS,
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": [
            r"re:.*lm_head$",
            r"re:.*self_attn.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj$",
            r"re:.*mlp\.gate$",
            r"re:.*shared_experts.*",
            r"re:.*eh_proj.*",
            r"re:.*embed_tokens.*",
        ],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def test_golden_mixed_form_of_glm_5_2() -> None:
    block, _ = accepted(plan_of(tiny("glm-5.2-fp8"), "glm-5.2-int4-fp8", tensor_parallel=1))
    assert block["format"] == "mixed-precision"
    assert block["config_groups"] == {
        "group_0": {
            "targets": [EXPERT_PATTERN],
            "format": "pack-quantized",
            "weights": PORTABLE_WEIGHTS,
            "input_activations": None,
            "output_activations": None,
        },
        "group_1": {
            "targets": ["Linear"],
            "format": "float-quantized",
            "weights": {
                "num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "dynamic": False,
                "block_structure": [128, 128],
            },
            "input_activations": {
                "num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "dynamic": True,
                "group_size": 128,
            },
            "output_activations": None,
        },
    }  # fmt: skip
    assert block["ignore"][:2] == [r"re:.*lm_head$", "model.layers.0.self_attn.indexer.weights_proj"]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "kimi-k2.6-int4"])
def test_the_default_recipe_of_every_family_matches_its_modules(name: str) -> None:
    checkpoint = tiny(name)
    plan = plan_of(checkpoint, DEFAULT_RECIPES[checkpoint.config.model_type])
    assert plan.quantization is not None
    assert plan.quantization["format"] == "pack-quantized"
    assert_matches(plan, "4 group 32", None)


def test_native_int4_keeps_its_own_block() -> None:
    plan = plan_of(tiny("kimi-k2.6-int4"), "kimi-k2.6")
    block, _ = accepted(plan)
    assert block == plan.source.config.quantization
    assert plan.config_bytes == plan.source.config.raw_bytes


def test_native_int4_with_a_part_converted_gets_a_new_block() -> None:
    name = "language_model.model.layers.0.mlp.up_proj.weight"
    checkpoint = with_tensor(tiny("kimi-k2.6-int4"), name, "F8_E4M3", (512, 256))
    checkpoint = with_tensor(checkpoint, f"{name}_scale", "F32", (512, 1))
    checkpoint = with_tensor(checkpoint, "vision_tower.blocks.0.wo.weight", "BF16", (32, 32))
    plan = plan_of(checkpoint, "kimi-k2-int4")
    block, _ = accepted(plan)
    assert {r"re:.*lm_head$", r"re:.*vision_tower.*"} <= set(block["ignore"])
    assert_matches(plan, "4 group 32", None)


def test_the_mixed_recipe_matches_its_modules() -> None:
    plan = plan_of(tiny("glm-5.2-fp8"), "glm-5.2-int4-fp8", tensor_parallel=1)
    assert_matches(plan, "4 group 32", "8 block")


def test_channel_fp8_beside_int4() -> None:
    plan = plan_of(tiny("glm-4.7-fp8"), recipe(INT4_EXPERTS, default="keep"))
    block, theirs = accepted(plan)
    assert_matches(plan, "4 group 32", "8 channel")
    assert block["config_groups"]["group_1"]["input_activations"]["strategy"] == "token"
    assert theirs.config_groups["group_1"].input_activations.dynamic is True


def test_one_int4_scale_a_row() -> None:
    plan = plan_of(tiny("glm-5.2-fp8"), recipe(CHANNEL_EXPERTS))
    block, _ = accepted(plan)
    assert block["config_groups"]["group_0"]["weights"]["strategy"] == "channel"
    assert block["config_groups"]["group_0"]["weights"]["group_size"] is None
    assert_matches(plan, "4 channel", None)


def test_fp8_alone_that_had_a_part_converted() -> None:
    rule = {"roles": ["dense_mlp"], "format": "bf16"}
    plan = plan_of(tiny("glm-5.2-fp8"), recipe(rule, default="keep"))
    block, _ = accepted(plan)
    assert (block["format"], list(block["config_groups"])) == ("float-quantized", ["group_0"])
    assert_matches(plan, None, "8 block")


def test_a_tensor_scale_is_said_as_such() -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    checkpoint = tiny("glm-4.7-fp8")
    for stored in [stored for stored in checkpoint.tensors if stored.endswith("weight_scale")]:
        checkpoint = with_tensor(checkpoint, stored, "F32", (1,))
    assert source_of(checkpoint, name).format == "fp8-tensor"
    plan = plan_of(checkpoint, recipe(INT4_EXPERTS, default="keep"))
    assert_matches(plan, "4 group 32", "8 tensor")


def test_a_split_role_falls_back_to_names() -> None:
    rules = ({"names": [r"model\.layers\.0\.mlp\..*"], "format": {"type": "int4"}}, INT4_EXPERTS)
    plan = plan_of(tiny("glm-4.7-fp8", first_k_dense_replace=2), recipe(*rules))
    block, _ = accepted(plan)
    dense = [f"model.layers.1.mlp.{part}_proj" for part in ("gate", "up", "down")]
    assert [entry for entry in block["ignore"] if "layers" in entry] == dense
    assert r"re:.*mlp\.(gate|up|gate_up|down)_proj$" not in block["ignore"]
    assert r"re:.*self_attn.*" in block["ignore"]
    assert_matches(plan, "4 group 32", None)


def test_experts_of_the_mtp_layer_kept_in_bf16_are_named() -> None:
    rules = ({"roles": ["routed_expert"], "names": [r"model\.layers\.3\..*"], "format": "bf16"}, INT4_EXPERTS)
    plan = plan_of(tiny("glm-5.2-fp8"), recipe(*rules))
    block, _ = accepted(plan)
    named = [entry for entry in block["ignore"] if entry.startswith("model.layers.3.mlp.experts.")]
    assert len(named) == 12
    assert_matches(plan, "4 group 32", None)


def test_two_forms_at_once_are_refused() -> None:
    sizes = ({"names": [r".*layers\.1\..*experts\.\d.*"], "format": {"type": "int4", "group_size": 64}}, INT4_EXPERTS)
    with refusal(RecipeError, "INT4 groups 32, 64 at once"):
        plan_of(tiny("glm-4.7-fp8"), recipe(*sizes))
    with refusal(RecipeError, "INT4 groups 32, channel at once"):
        plan_of(tiny("glm-4.7-fp8"), recipe({**CHANNEL_EXPERTS, "names": [r".*layers\.1\..*"]}, INT4_EXPERTS))
    name = "model.layers.0.self_attn.o_proj.weight"
    checkpoint = without_tensor(tiny("glm-5.2-fp8"), f"{name}_scale_inv")
    checkpoint = with_tensor(checkpoint, f"{name}_scale", "F32", (256, 1))
    with refusal(RecipeError, "two FP8 forms at once"):
        plan_of(checkpoint, recipe(INT4_EXPERTS, default="keep"))


def test_nothing_quantized_is_no_block() -> None:
    assert build_quantization_config(plan_of(tiny("glm-4.7-fp8"), "dequantize").tensors) is None


@pytest.mark.parametrize("by", ["glm-4.7-int4", "mixed"])
def test_a_tied_head_is_ignored_although_it_has_no_tensor(by: str) -> None:
    checkpoint = tiny("glm-4.7-fp8", tie_word_embeddings=True)
    plan = plan_of(checkpoint, recipe(INT4_EXPERTS, default="keep") if by == "mixed" else by)
    block, theirs = accepted(plan)
    assert block["ignore"].count(r"re:.*lm_head$") == 1
    for module in ("lm_head", "language_model.lm_head", "model.embed_tokens"):
        assert scheme_of(module, theirs) is None
    head = {"roles": ["lm_head"], "format": {"type": "int4"}}
    stored = plan_of(tiny("glm-4.7-fp8"), recipe(head, INT4_EXPERTS))
    assert scheme_of("lm_head", accepted(stored)[1]) == "4 group 32"


def test_a_role_without_a_pattern_is_named_module_by_module() -> None:
    specs = [t.source.spec for t in plan_of(tiny("glm-4.7-fp8"), "copy").tensors if t.source.spec.role == "embedding"]
    assert module_patterns(specs, []) == ("model.embed_tokens",)
