"""Every tensor's fate: what each format does to each kind of source, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from refusals import refusal
from tiny_checkpoints import NAMES, tiny_config
from tiny_plans import INT4_EXPERTS, checkpoint_of, plan_of, recipe, tiny, with_tensor, without_tensor

from memopt.compressor.checkpoint.checkpoint import Checkpoint
from memopt.compressor.plan import Plan
from memopt.compressor.recipe import DEFAULT_RECIPES, load_recipe
from memopt.compressor.tensor_plan import Fate, TensorPlan
from memopt.errors import RecipeError, UnsupportedError

O_PROJ = "model.layers.1.self_attn.o_proj.weight"
UP = "model.layers.1.mlp.experts.0.up_proj.weight"
KIMI_UP = f"language_model.{UP}"


def tensor_of(plan: Plan, name: str) -> TensorPlan:
    (tensor,) = [tensor for tensor in plan.tensors if tensor.source.spec.name == name]
    return tensor


def outputs(tensor: TensorPlan) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(output.name, output.dtype, output.shape) for output in tensor.outputs]


def channel_scaled(checkpoint: Checkpoint, name: str, rows: int) -> Checkpoint:
    return with_tensor(without_tensor(checkpoint, f"{name}_scale_inv"), f"{name}_scale", "F32", (rows, 1))


def test_an_expert_becomes_words_scales_and_a_shape() -> None:
    tensor = tensor_of(plan_of(tiny("glm-5.2-fp8", hidden_size=384), "glm-5.2-int4"), UP)
    assert (tensor.fate, tensor.output_format, tensor.is_int4) == (Fate.QUANTIZED, "int4 group 32", True)
    base = UP.removesuffix(".weight")
    assert outputs(tensor) == [
        (f"{base}.weight_packed", "I32", (256, 48)),
        (f"{base}.weight_scale", "BF16", (256, 12)),
        (f"{base}.weight_shape", "I64", (2,)),
    ]


@pytest.mark.parametrize(("group", "columns"), [(64, 4), (128, 2), ("channel", 1)])
def test_scales_of_other_groups(group: int | str, columns: int) -> None:
    rule = {"roles": ["routed_expert"], "format": {"type": "int4", "group_size": group}}
    tensor = tensor_of(plan_of(tiny("glm-5.2-fp8"), recipe(rule)), UP)
    assert tensor.outputs[1].shape == (256, columns)
    assert tensor.output_format == f"int4 group {group}"


def test_everything_else_becomes_bf16_and_the_router_bias_stays_f32() -> None:
    plan = plan_of(tiny("glm-5.2-fp8"), "glm-5.2-int4")
    attention = tensor_of(plan, O_PROJ)
    assert (attention.fate, outputs(attention)) == (Fate.CONVERTED, [(O_PROJ, "BF16", (256, 256))])
    bias = tensor_of(plan, "model.layers.1.mlp.gate.e_score_correction_bias")
    assert (bias.fate, bias.outputs[0].dtype) == (Fate.COPIED, "F32")
    written = {output.dtype for tensor in plan.tensors for output in tensor.outputs}
    assert written == {"I32", "I64", "BF16", "F32"}


@pytest.mark.parametrize("name", NAMES)
def test_copy_gives_the_source_back(name: str) -> None:
    checkpoint = tiny(name)
    plan = plan_of(checkpoint, "copy")
    assert plan.fate_counts == {Fate.COPIED: len(plan.tensors)}
    given = {output.name: (output.dtype, output.shape) for tensor in plan.tensors for output in tensor.outputs}
    assert given == {name: (t.dtype, t.shape) for name, t in checkpoint.tensors.items()}
    assert plan.config_bytes == checkpoint.config.raw_bytes


@pytest.mark.parametrize("name", NAMES)
def test_dequantize_leaves_plain_tensors_only(name: str) -> None:
    plan = plan_of(tiny(name), "dequantize")
    given = {output.name: output.dtype for tensor in plan.tensors for output in tensor.outputs}
    assert set(given) == {tensor.source.spec.name for tensor in plan.tensors}
    assert set(given.values()) == {"BF16", "F32"}
    assert plan.quantization is None
    assert b"quantization_config" not in plan.config_bytes


@pytest.mark.parametrize("name", NAMES)
def test_the_default_recipe_quantizes_every_expert_and_nothing_else(name: str) -> None:
    checkpoint = tiny(name)
    plan = plan_of(checkpoint, load_recipe(DEFAULT_RECIPES[checkpoint.config.model_type]))
    experts = {tensor.is_int4 for tensor in plan.tensors if tensor.source.spec.role == "routed_expert"}
    others = {tensor.is_int4 for tensor in plan.tensors if tensor.source.spec.role != "routed_expert"}
    assert (experts, others) == ({True}, {False})
    mtp = [tensor for tensor in plan.tensors if tensor.source.spec.is_mtp and tensor.is_int4]
    assert len(mtp) == (12 if checkpoint.config.text.get("num_nextn_predict_layers") else 0)


@pytest.mark.parametrize("by", ["kimi-k2.6", "kimi-k2-int4", "copy"])
def test_native_int4_passes_through_untouched(by: str) -> None:
    checkpoint = tiny("kimi-k2.6-int4")
    tensor = tensor_of(plan_of(checkpoint, by), KIMI_UP)
    assert (tensor.fate, tensor.is_int4, tensor.int4_group_size) == (Fate.COPIED, True, 32)
    assert [name for name, _, _ in outputs(tensor)] == [part.name for part in tensor.source.parts]


@pytest.mark.parametrize(
    ("name", "expert", "form"),
    [
        ("kimi-k2-instruct-fp8", UP, "fp8-block 128x128"),
        ("kimi-k2-instruct-fp8", UP, "BF16"),
        ("kimi-k2.6-int4", KIMI_UP, "int4 group 64"),
    ],
)
def test_the_pass_through_recipe_refuses_what_is_not_int4_already(name: str, expert: str, form: str) -> None:
    checkpoint = tiny(name)
    if form == "BF16":
        checkpoint = tiny(name, quantization_config=None)
    if form == "int4 group 64":
        checkpoint = with_tensor(checkpoint, f"{expert}_scale", "BF16", (256, 4))
    expected = expert.replace("up_proj", "gate_proj") if "64" not in form else expert
    with refusal(RecipeError, expected, "model.safetensors", f"is {form}", "INT4 in groups of 32 already"):
        plan_of(checkpoint, "kimi-k2.6")


@pytest.mark.parametrize("block", [[128, 36], [1, 4], [64, 255]])
@pytest.mark.parametrize("by", ["glm-5.2-int4", "dequantize"])
def test_blocks_that_no_kernel_expands_are_refused_in_the_plan(block: list[int], by: str) -> None:
    config = tiny_config("glm-5.2-fp8")
    config["quantization_config"]["weight_block_size"] = block
    checkpoint = checkpoint_of(config)
    words = (".weight", "model.safetensors", f"blocks of {block[0]}x{block[1]}", "not a multiple of 8")
    with refusal(UnsupportedError, *words):
        plan_of(checkpoint, by)
    assert plan_of(checkpoint, "copy").fate_counts == {Fate.COPIED: len(plan_of(checkpoint, "copy").tensors)}
    # A block as wide as the weight, or wider, cuts nothing.
    config["quantization_config"]["weight_block_size"] = [128, 1025]
    plan_of(checkpoint_of(config), by)


@pytest.mark.parametrize("dtype", ["F16", "F64"])
@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight"])
def test_what_is_not_bf16_is_not_passed_off_as_bf16(name: str, dtype: str) -> None:
    checkpoint = tiny("glm-5.2-fp8")
    checkpoint = with_tensor(checkpoint, name, dtype, checkpoint.tensors[name].shape)
    with refusal(UnsupportedError, name, "model.safetensors", f"{dtype} does not become BF16", "`keep`"):
        plan_of(checkpoint, "glm-5.2-int4")
    keep = {"names": [name], "format": "keep"}
    assert tensor_of(plan_of(checkpoint, recipe(keep, INT4_EXPERTS)), name).outputs[0].dtype == dtype


@pytest.mark.parametrize(("stored", "written"), [((256,), (256, 1)), ((256, 1), (256, 1)), ((), (1,)), ((1, 1), (1,))])
def test_a_kept_scale_takes_the_shape_that_its_strategy_says(stored: tuple[int, ...], written: tuple[int, ...]) -> None:
    checkpoint = tiny("glm-4.7-fp8")
    for name, tensor in checkpoint.tensors.items():
        if name.endswith("weight_scale"):
            shape = (tensor.shape[0], *stored[1:]) if 256 in stored else stored
            checkpoint = with_tensor(checkpoint, name, "F32", shape)
    mixed = tensor_of(plan_of(checkpoint, recipe(INT4_EXPERTS, default="keep")), O_PROJ)
    assert outputs(mixed) == [(O_PROJ, "F8_E4M3", (256, 256)), (f"{O_PROJ}_scale", "F32", written)]
    assert tensor_of(plan_of(checkpoint, "copy"), O_PROJ).outputs[1].shape == stored


@pytest.mark.parametrize(("group", "word"), [(64, "to 64"), (128, "to 128"), ("channel", "to 256")])
def test_native_int4_is_never_quantized_again(group: int | str, word: str) -> None:
    rule = {"roles": ["routed_expert"], "format": {"type": "int4", "group_size": group}}
    with refusal(RecipeError, "language_model.", "groups of 32", "never requantized", word, "group_size 32"):
        plan_of(tiny("kimi-k2.6-int4"), recipe(rule))


def test_kept_fp8_beside_int4_takes_compressed_tensors_name_for_its_scale() -> None:
    checkpoint = tiny("glm-5.2-fp8")
    mixed = tensor_of(plan_of(checkpoint, "glm-5.2-int4-fp8", tensor_parallel=1), O_PROJ)
    assert (mixed.fate, mixed.is_float8) == (Fate.COPIED, True)
    assert outputs(mixed) == [(O_PROJ, "F8_E4M3", (256, 256)), (f"{O_PROJ}_scale", "F32", (2, 2))]
    alone = tensor_of(plan_of(checkpoint, "copy"), O_PROJ)
    assert [name for name, _, _ in outputs(alone)] == [O_PROJ, f"{O_PROJ}_scale_inv"]


@pytest.mark.parametrize("dtype", ["U8", "F8_E8M0"])
def test_exponent_scales_cannot_stay_beside_int4_but_may_be_copied_or_decoded(dtype: str) -> None:
    checkpoint = with_tensor(tiny("glm-5.2-fp8"), f"{O_PROJ}_scale_inv", dtype, (2, 2))
    with refusal(UnsupportedError, f"{O_PROJ}_scale_inv", dtype, "default is bf16"):
        plan_of(checkpoint, "glm-5.2-int4-fp8", tensor_parallel=1)
    assert tensor_of(plan_of(checkpoint, "copy"), O_PROJ).fate is Fate.COPIED
    assert tensor_of(plan_of(checkpoint, "glm-5.2-int4"), O_PROJ).fate is Fate.CONVERTED


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"roles": ["norm"], "format": {"type": "int4"}}, ("norm.weight", "norm (256,)")),
        ({"roles": ["embedding"], "format": {"type": "int4"}}, ("model.embed_tokens.weight", "embedding (512, 256)")),
        ({"roles": ["router_bias"], "format": {"type": "int4"}}, ("e_score_correction_bias", "router_bias (4,)")),
    ],
)
def test_only_linear_weights_can_be_int4(rule: dict[str, Any], words: tuple[str, ...]) -> None:
    with refusal(RecipeError, "only Linear weights", *words):
        plan_of(tiny("glm-4.7-fp8"), recipe(rule))


@pytest.mark.parametrize("dtype", ["F32", "F16", "F64"])
def test_only_fp8_and_bf16_are_quantized(dtype: str) -> None:
    checkpoint = without_tensor(tiny("glm-5.2-fp8"), f"{UP}_scale_inv")
    with refusal(UnsupportedError, UP, "model.safetensors", f"{dtype} cannot be quantized"):
        plan_of(with_tensor(checkpoint, UP, dtype, (256, 256)), recipe(INT4_EXPERTS))


def test_every_kind_of_source_can_be_an_expert() -> None:
    checkpoint = tiny("glm-5.2-fp8")
    for source in (
        checkpoint,
        channel_scaled(checkpoint, UP, 256),
        with_tensor(without_tensor(checkpoint, f"{UP}_scale_inv"), UP, "BF16", (256, 256)),
    ):
        assert tensor_of(plan_of(source, "glm-5.2-int4"), UP).fate is Fate.QUANTIZED


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("by", ["copy", "dequantize"])
def test_every_tensor_has_exactly_one_fate(name: str, by: str) -> None:
    checkpoint = tiny(name)
    plan = plan_of(checkpoint, by)
    parts = [part.name for tensor in plan.tensors for part in tensor.source.parts]
    assert sorted(parts) == sorted(checkpoint.tensors)
    assert all(bool(tensor.outputs) == (tensor.fate is not Fate.DROPPED) for tensor in plan.tensors)
    assert all((tensor.int4 is not None) == (tensor.fate is Fate.QUANTIZED) for tensor in plan.tensors)
