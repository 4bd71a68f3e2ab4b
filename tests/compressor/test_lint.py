"""The engine lint: every rule fires on an output made for it, and shipped recipes pass all of them."""

from __future__ import annotations

from typing import Any

import pytest
from lint_findings import ENGINES, findings, fired, plans_of
from refusals import refusal
from tiny_checkpoints import NAMES, tiny_config
from tiny_plans import INT4_EXPERTS, checkpoint_of, plan_of, recipe, tiny, with_tensor

from memopt.compressor.lint import lint, raise_on_error
from memopt.compressor.recipe import load_recipe, shipped_recipe_names
from memopt.errors import LintError

INT4 = {"type": "int4"}
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
    "glm-5.2-int4-gptq": ("glm-5.2-fp8", "glm-5.1-fp8"),
    "kimi-k2-int4": ("kimi-k2-instruct-fp8", "deepseek-v3-fp8", "kimi-k2.6-int4"),
    "kimi-k2.6": ("kimi-k2.6-int4",),
}


@pytest.mark.parametrize("by", shipped_recipe_names())
def test_shipped_recipes_pass(by: str) -> None:
    for name in SHIPPED[by]:
        plan = plan_of(tiny(name), by, tensor_parallel=1)
        assert {note.severity for note in plan.notes} <= {"note"}
