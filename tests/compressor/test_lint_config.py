"""The engine lint on config.json's block: stale and missing formats, ignore lists, act-order, the mixed form."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from lint_findings import ENGINES, findings, fired, plans_of
from refusals import refusal
from tiny_checkpoints import tiny_config
from tiny_plans import INT4_EXPERTS, checkpoint_of, plan_of, recipe, tiny

from memopt.compressor.checkpoint.model_config import parse_config
from memopt.compressor.lint import EngineNote, lint, raise_on_error
from memopt.compressor.quantization_config import build_quantization_config
from memopt.compressor.recipe import load_recipe
from memopt.errors import ConfigError, LintError


def kept(change: dict[str, Any], name: str = "kimi-k2.6-int4") -> tuple[EngineNote, ...]:
    """The lint of a checkpoint that is copied with its own block, changed."""
    config = tiny_config(name)
    table = config.get("text_config", config)
    plans = plans_of(checkpoint_of(config), load_recipe("copy"))
    return lint(plans, table["quantization_config"] | change, ENGINES, is_config_rewritten=False)


def with_group(**weights: Any) -> dict[str, Any]:
    table = tiny_config("kimi-k2.6-int4")["text_config"]["quantization_config"]
    group = table["config_groups"]["group_0"]
    return {"config_groups": {"group_0": group | {"weights": group["weights"] | weights}}}


@pytest.mark.parametrize("order", ["static", "weight", "group"])
def test_an_act_order_in_a_kept_block_is_told(order: str) -> None:
    notes = kept(with_group(actorder=order))
    assert fired(notes) == {"actorder-null": {"vllm"}}
    with refusal(LintError, "group_0", repr(order), "#41511"):
        raise_on_error(notes)


def test_a_published_int4_block_passes() -> None:
    assert fired(kept({})) == {}


def test_a_stale_fp8_block_over_int4_tensors() -> None:
    plans = plans_of(tiny("glm-5.2-fp8"), load_recipe("glm-5.2-int4"))
    stale = tiny_config("glm-5.2-fp8")["quantization_config"]
    notes = lint(plans, stale, ENGINES, is_config_rewritten=True)
    assert fired(notes) == {"undeclared-format": set(ENGINES), "stale-format": set(ENGINES)}
    with refusal(LintError, "int4 group 32 is stored but config.json does not declare it"):
        raise_on_error(notes)


FP8_BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("block", "form"),
    [
        (FP8_BLOCK, "FP8"),
        (tiny_config("glm-4.7-fp8")["quantization_config"], "FP8"),
        (tiny_config("kimi-k2.6-int4")["text_config"]["quantization_config"], "INT4"),
        ({"quant_method": "awq"}, "awq"),
    ],
)
def test_a_block_over_plain_tensors_is_stale_and_goes(block: dict[str, Any], form: str) -> None:
    config = tiny_config("glm-5.2-fp8", quantization_config=None)
    plain = checkpoint_of(config)
    stale = replace(plain, config=parse_config(json.dumps(config | {"quantization_config": block}).encode()))
    plans = plans_of(stale, load_recipe("copy"))
    notes = lint(plans, block, ENGINES, is_config_rewritten=False)
    assert fired(notes)["stale-format"] == set(ENGINES)
    with refusal(LintError, "config.json", f"declares {form} weights but none is stored"):
        raise_on_error(tuple(note for note in notes if note.rule == "stale-format"))
    for by in ("copy", "dequantize", "glm-5.2-int4"):
        plan = plan_of(stale, by)
        assert plan.quantization == plan_of(plain, by).quantization
        assert json.loads(plan.config_bytes) == json.loads(plan_of(plain, by).config_bytes)


def test_one_format_of_two_that_are_declared() -> None:
    mixed = plans_of(tiny("glm-5.2-fp8"), load_recipe("glm-5.2-int4-fp8"))
    block = build_quantization_config(mixed)
    assert fired(lint(mixed, block, ENGINES[:1], is_config_rewritten=True)) == {}
    plain = plans_of(tiny("glm-5.2-fp8"), load_recipe("glm-5.2-int4"))
    assert "stale-format" in fired(lint(plain, block, ENGINES[:1], is_config_rewritten=True))


def test_fp8_that_nothing_declares() -> None:
    config = tiny_config("glm-5.2-fp8")
    plans = plans_of(checkpoint_of(config), load_recipe("copy"))
    assert fired(lint(plans, config["quantization_config"], ENGINES, is_config_rewritten=False)) == {}
    notes = lint(plans, None, ENGINES, is_config_rewritten=False)
    assert fired(notes) == {"undeclared-format": set(ENGINES)}
    assert "fp8-block 128x128 is stored" in notes[0].message


def test_plain_tensors_need_no_block() -> None:
    plans = plans_of(tiny("glm-5.2-fp8"), load_recipe("dequantize"))
    assert fired(lint(plans, None, ENGINES, is_config_rewritten=True)) == {}


def test_an_ignore_list_that_lacks_a_module_or_names_too_many() -> None:
    plans = plans_of(tiny("glm-5.2-fp8"), load_recipe("glm-5.2-int4"))
    block = build_quantization_config(plans)
    assert block is not None

    def errors(ignore: list[str]) -> set[tuple[str, str]]:
        notes = lint(plans, block | {"ignore": ignore}, ENGINES, is_config_rewritten=True)
        return {(note.module, note.message) for note in notes if note.severity == "error"}

    without_head = [entry for entry in block["ignore"] if "lm_head" not in entry]
    assert errors(without_head) == {("lm_head", "is not quantized and `ignore` lacks it")}
    without_mtp = [entry.replace("re:.*self_attn", r"re:model\.layers\.[012]\.self_attn") for entry in block["ignore"]]
    missing = {module for module, _ in errors(without_mtp)}
    assert missing
    assert all(module.startswith("model.layers.3.self_attn.") for module in missing)
    expert = "model.layers.1.mlp.experts.0.up_proj"
    assert errors([*block["ignore"], expert]) == {(expert, "is quantized but `ignore` names it")}
    assert errors(block["ignore"]) == set()


def test_patterns_match_from_the_start_as_in_compressed_tensors() -> None:
    plans = plans_of(tiny("glm-5.2-fp8"), load_recipe("glm-5.2-int4"))
    block = build_quantization_config(plans)
    assert block is not None
    unanchored = [entry.replace("re:.*", "re:") for entry in block["ignore"]]
    notes = lint(plans, block | {"ignore": unanchored}, ENGINES, is_config_rewritten=True)
    assert "ignore-list" in fired(notes)


def test_the_mixed_form_is_refused_for_sglang_and_noted_otherwise() -> None:
    notes = findings("glm-5.2-fp8", INT4_EXPERTS, default="keep")
    assert fired(notes) == {"mixed-format": {"sglang"}}
    with refusal(LintError, "sglang would refuse", "mixed-format", "FP8 group beside INT4"):
        plan_of(tiny("glm-5.2-fp8"), recipe(INT4_EXPERTS, default="keep", engines=["sglang"]))
    plan = plan_of(tiny("glm-5.2-fp8"), "glm-5.2-int4-fp8", tensor_parallel=1)
    mixed = {note.engine: note for note in plan.notes if note.rule == "mixed-format"}
    assert {engine: note.severity for engine, note in mixed.items()} == {"sglang": "note", "transformers": "note"}
    assert "CompressedTensorsConfig(dequantize=True)" in mixed["transformers"].message


@pytest.mark.parametrize(
    "ignore", [5, "lm_head", {"lm_head": 1}, [3], [None], ["re:("], ["re:a{99999999999999999999}"]]
)
def test_an_ignore_list_of_the_source_that_is_none_is_refused(ignore: Any) -> None:
    config = tiny_config("kimi-k2.6-int4")
    config["text_config"]["quantization_config"]["ignore"] = ignore
    with refusal(ConfigError, "config.json", "ignore"):
        plan_of(checkpoint_of(config), "copy")


@pytest.mark.parametrize("group", [None, 3, [], {"weights": None}, {"weights": [4]}, {"weights": "int4"}])
def test_odd_groups_in_a_kept_block_do_no_harm(group: Any) -> None:
    groups = with_group()["config_groups"]
    assert fired(kept({"config_groups": groups | {"group_1": group}})) == {}
    # Groups that are no table declare nothing.
    assert fired(kept({"config_groups": [group]})) == {"undeclared-format": set(ENGINES)}
