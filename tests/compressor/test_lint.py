"""The engine lint: every rule fires on an output made for it, and shipped recipes pass all of them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from refusals import refusal
from tiny_checkpoints import NAMES, tiny_config
from tiny_plans import INT4_EXPERTS, checkpoint_of, plan_of, recipe, tiny, with_tensor

from memopt.compressor.checkpoint.checkpoint import Checkpoint
from memopt.compressor.checkpoint.model_config import parse_config
from memopt.compressor.checkpoint.source_tensor import scan_source
from memopt.compressor.families.registry import family_of
from memopt.compressor.families.text_config import parse_text_config
from memopt.compressor.lint import EngineNote, lint, raise_on_error
from memopt.compressor.quantization_config import build_quantization_config
from memopt.compressor.recipe import Recipe, load_recipe, shipped_recipe_names
from memopt.compressor.tensor_plan import TensorPlan, plan_tensors
from memopt.errors import ConfigError, LintError

INT4 = {"type": "int4"}
ENGINES = ("vllm", "sglang", "transformers")
INDEXER = ".self_attn.indexer"


def plans_of(checkpoint: Checkpoint, by: Recipe) -> tuple[TensorPlan, ...]:
    family = family_of(checkpoint.config)
    found = scan_source(checkpoint, family, parse_text_config(checkpoint.config))
    assert found.problems == ()
    return plan_tensors(by, family.name, found.tensors)


def findings(name: str, *rules: dict[str, Any], hidden_size: int = 256, **fields: Any) -> list[EngineNote]:
    """What the lint says of a tiny checkpoint's output under a recipe that promises every engine."""
    plans = plans_of(tiny(name, hidden_size=hidden_size), recipe(*rules, **fields))
    return list(lint(plans, build_quantization_config(plans), ENGINES, is_config_rewritten=True))


def fired(notes: list[EngineNote] | tuple[EngineNote, ...]) -> dict[str, set[str]]:
    """Rules that are errors, and for which engines."""
    found: dict[str, set[str]] = {}
    for note in notes:
        if note.severity == "error":
            found.setdefault(note.rule, set()).add(note.engine)
    return found


BOTH = {"vllm", "sglang"}


@pytest.mark.parametrize(
    ("name", "pattern", "module"),
    [
        ("glm-5.2-fp8", r"model\.layers\.0\.self_attn\.q_a_proj\.weight", "model.layers.0.self_attn.q_a_proj"),
        ("glm-5.2-fp8", r"model\.layers\.0\.self_attn\.kv_a_proj.*weight", "model.layers.0.self_attn.q_a_proj"),
        ("glm-4.7-fp8", r"model\.layers\.0\.self_attn\.k_proj\.weight", "model.layers.0.self_attn.q_proj"),
        ("glm-4.7-fp8", r"model\.layers\.0\.mlp\.up_proj\.weight", "model.layers.0.mlp.gate_proj"),
        ("glm-4.7-fp8", r".*\.1\.mlp\.shared_experts\.up_proj\.weight", "model.layers.1.mlp.shared_experts.gate_proj"),
    ],
)
def test_fused_modules_share_one_scheme(name: str, pattern: str, module: str) -> None:
    rule = {"names": [pattern], "format": INT4}
    notes = findings(name, rule, INT4_EXPERTS)
    assert fired(notes) == {"fused-all-or-none": BOTH}
    assert {note.module for note in notes if note.severity == "error"} == {module}
    with refusal(LintError, module, "vllm would refuse or garble", "fused-all-or-none", "int4 group 32", "unquantized"):
        raise_on_error(tuple(notes))


def test_fused_modules_that_are_all_int4_pass() -> None:
    rule = {"roles": ["attention", "dense_mlp", "shared_expert"], "format": INT4}
    assert fired(findings("glm-4.7-fp8", rule, INT4_EXPERTS)) == {}


def test_experts_of_a_layer_share_one_scheme() -> None:
    rule = {"names": [r"model\.layers\.1\.mlp\.experts\.3\..*"], "format": "bf16"}
    notes = findings("glm-4.7-fp8", rule, INT4_EXPERTS)
    assert fired(notes) == {"experts-one-scheme": BOTH}
    assert {note.module for note in notes if note.severity == "error"} == {"layer 1"}
    whole_layer = {"names": [r"model\.layers\.1\.mlp\.experts\..*"], "format": "bf16"}
    assert fired(findings("glm-4.7-fp8", whole_layer, INT4_EXPERTS)) == {}


@pytest.mark.parametrize(
    ("role", "vllm", "sglang"),
    [
        ("kv_b", None, "kv_b_proj.weight directly"),
        ("router", "router is always unquantized", "router is always unquantized"),
        ("indexer", "fused BF16 wk_weights_proj", "wk is fused with weights_proj"),
        ("indexer_weights", "weights_proj is always unquantized", "weights_proj is always unquantized"),
        ("lm_head", "unless a target names it", "garbage"),
        ("mtp_projection", "eh_proj is always unquantized", "eh_proj is always unquantized"),
    ],
)
def test_modules_that_engines_read_plain_are_never_int4(role: str, vllm: str | None, sglang: str) -> None:
    notes = findings("glm-5.2-fp8", {"roles": [role], "format": INT4}, INT4_EXPERTS)
    reasons = {"vllm": vllm, "sglang": sglang}
    assert fired(notes) == {"never-int4": {engine for engine, reason in reasons.items() if reason}}
    assert all((reasons[note.engine] or "?") in note.message for note in notes if note.severity == "error")


def test_only_wk_of_the_indexer_must_stay_plain() -> None:
    def rule(part: str) -> dict[str, Any]:
        return {"names": [rf".*indexer\.{part}\.weight"], "format": INT4}

    assert fired(findings("glm-5.2-fp8", rule("wq_b"), INT4_EXPERTS)) == {}
    notes = [note for note in findings("glm-5.2-fp8", rule("wk"), INT4_EXPERTS) if note.severity == "error"]
    assert {note.module.rpartition(".")[2] for note in notes} == {"wk"}
    assert {note.engine for note in notes} == BOTH


def test_the_mtp_head_is_never_int4() -> None:
    rule = {"names": [r".*shared_head\.head\.weight"], "format": INT4}
    assert fired(findings("glm-4.7-fp8", rule, INT4_EXPERTS)) == {"never-int4": BOTH}


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


def test_a_moe_kernel_has_few_groups() -> None:
    # Groups of 16 divide 256 and are read, but no engine has a kernel for them.
    checkpoint = tiny("kimi-k2.6-int4")
    for name in [name for name in checkpoint.tensors if name.endswith("experts.0.up_proj.weight_scale")]:
        checkpoint = with_tensor(checkpoint, name, "BF16", (256, 16))
    for stored in [name for name in checkpoint.tensors if name.endswith("_proj.weight_scale")]:
        rows = checkpoint.tensors[stored].shape[0]
        checkpoint = with_tensor(checkpoint, stored, "BF16", (rows, 16))
    plans = plans_of(checkpoint, load_recipe("copy"))
    notes = lint(plans, checkpoint.config.quantization, ENGINES, is_config_rewritten=False)
    assert fired(notes) == {"moe-group-size": BOTH}
    assert any("group 16" in note.message and "32, 64, 128" in note.message for note in notes)


def test_marlin_wants_a_hidden_size_of_128s() -> None:
    notes = findings("glm-4.7-fp8", INT4_EXPERTS, hidden_size=320)
    assert fired(notes) == {"moe-hidden-size": {"vllm"}}
    assert any("hidden size 320" in note.message for note in notes)


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


@pytest.mark.parametrize(("scale", "is_noted"), [("mse-signed", True), ("mse", False), ("absmax", False)])
def test_negative_scales_are_noted(scale: str, is_noted: bool) -> None:
    rule = {"roles": ["routed_expert"], "format": {"type": "int4", "scale": scale}}
    notes = plan_of(tiny("glm-5.2-fp8"), recipe(rule, engines=list(ENGINES))).notes
    signed = [note for note in notes if note.rule == "signed-scales"]
    assert bool(signed) == is_noted
    assert all(note.severity == "note" and "vLLM #48905" in note.message for note in signed)


def test_native_int4_has_no_negative_scales_of_ours() -> None:
    assert not [n for n in plan_of(tiny("kimi-k2.6-int4"), "kimi-k2.6").notes if n.rule == "signed-scales"]


def test_mtp_layers_are_noted_for_transformers() -> None:
    assert [n.engine for n in plan_of(tiny("glm-5.2-fp8"), "copy").notes if n.rule == "mtp"] == ["transformers"]
    assert not [n for n in plan_of(tiny("kimi-k2.6-int4"), "copy").notes if n.rule == "mtp"]


def test_python_files_that_the_config_names_are_noted() -> None:
    checkpoint = checkpoint_of(tiny_config("glm-4.7-fp8", auto_map={"AutoConfig": "configuration_x.X"}))
    assert [n.rule for n in plan_of(checkpoint, "copy").notes if n.rule == "auto-map"] == ["auto-map"]
    assert not [n for n in plan_of(checkpoint, "copy", allow_code=True).notes if n.rule == "auto-map"]


def test_what_no_engine_of_the_recipe_reads_is_a_note() -> None:
    rule = {"roles": ["router"], "format": INT4}
    plan = plan_of(tiny("glm-5.2-fp8"), recipe(rule, INT4_EXPERTS, engines=["transformers"]))
    never = [note for note in plan.notes if note.rule == "never-int4"]
    assert {note.engine for note in never} == BOTH
    assert {note.severity for note in never} == {"note"}


SHIPPED = {
    "copy": NAMES,
    "dequantize": NAMES,
    "glm-4.7-int4": ("glm-4.7-fp8",),
    "glm-5.1-int4": ("glm-5.1-fp8",),
    "glm-5.2-int4": ("glm-5.2-fp8",),
    "glm-5.2-int4-fp8": ("glm-5.2-fp8", "glm-5.1-fp8"),
    "kimi-k2-int4": ("kimi-k2-instruct-fp8", "deepseek-v3-fp8", "kimi-k2.6-int4"),
    "kimi-k2.6": ("kimi-k2.6-int4",),
}


@pytest.mark.parametrize("by", shipped_recipe_names())
def test_shipped_recipes_pass(by: str) -> None:
    for name in SHIPPED[by]:
        plan = plan_of(tiny(name), by, tensor_parallel=1)
        assert {note.severity for note in plan.notes} <= {"note"}


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
