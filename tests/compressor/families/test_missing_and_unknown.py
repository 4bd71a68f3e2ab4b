"""Nothing is dropped in silence: missing and unknown tensors are named; optional and extra ones have rules."""

from __future__ import annotations

import pytest
from refusals import assert_refusal, refusal
from tiny_checkpoints import NAMES
from tiny_plans import plan_of, recipe, scan, source_of, tiny, with_tensor, without_tensor

from memopt.compressor.tensor_plan import Fate
from memopt.errors import MissingTensorError, UnknownTensorError

INV_FREQ = "model.layers.0.self_attn.rotary_emb.inv_freq"
VISION = {
    "vision_tower.patch_embed.proj.weight": (16, 3, 4, 4),
    "vision_tower.encoder.blocks.0.wqkv.weight": (96, 32),
    "vision_tower.encoder.blocks.0.wqkv.bias": (96,),
    "vision_tower.encoder.final_layernorm.weight": (32,),
    "mm_projector.proj.0.weight": (64, 32),
}


@pytest.mark.parametrize("name", NAMES)
def test_every_missing_tensor_is_named(name: str) -> None:
    checkpoint = tiny(name)
    for source in scan(checkpoint).tensors:
        lacking = without_tensor(checkpoint, *(part.name for part in source.parts))
        if source.spec.is_required:
            (problem,) = scan(lacking).problems
            words = (source.spec.name, str(source.spec.role), checkpoint.config.model_type)
            assert_refusal(problem, MissingTensorError, *words)
        else:
            assert source.spec.role == "mtp_head"
            assert scan(lacking).problems == ()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "stranger",
    [
        "model.layers.0.self_attn.sinks",
        "model.layers.99.input_layernorm.weight",
        "model.layers.1.mlp.experts.4.up_proj.weight",
        "layers.0.input_layernorm.weight",
        "model.layers.1.mlp.experts.gate_up_proj",
        "rotary_emb.inv_freq.weight",
        "",
    ],
)
def test_every_unknown_tensor_is_named(name: str, stranger: str) -> None:
    (problem,) = scan(with_tensor(tiny(name), stranger, "BF16", (2, 2))).problems
    assert_refusal(problem, UnknownTensorError, stranger, "model.safetensors", "nothing is dropped in silence")


def test_the_plan_refuses_and_counts_the_rest() -> None:
    checkpoint = without_tensor(tiny("glm-4.7-fp8"), "model.norm.weight")
    with refusal(MissingTensorError, "model.norm.weight", "1 more problem"):
        plan_of(with_tensor(checkpoint, "stranger", "BF16", (2,)), "glm-4.7-int4")


@pytest.mark.parametrize("name", ["glm-5.2-fp8", "glm-4.7-fp8", "deepseek-v3-fp8"])
def test_an_mtp_layer_is_demanded_whole(name: str) -> None:
    checkpoint = tiny(name)
    mtp = [stored for stored in checkpoint.tensors if ".layers.3." in stored]
    problems = scan(without_tensor(checkpoint, *mtp)).problems
    named = {problem.tensor for problem in problems}
    assert {"model.layers.3.eh_proj.weight", "model.layers.3.mlp.experts.0.up_proj.weight"} <= named
    assert {type(problem) for problem in problems} == {MissingTensorError}


def test_glm_4_6_has_an_mtp_layer_without_embedding_and_head() -> None:
    own = ["model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"]
    checkpoint = tiny("glm-4.7-fp8")
    assert set(own) <= set(checkpoint.tensors)
    lacking = without_tensor(checkpoint, *own)
    assert scan(lacking).problems == ()
    plan = plan_of(lacking, "glm-4.7-int4")
    assert {t.fate for t in plan.tensors if t.source.spec.is_mtp} == {Fate.QUANTIZED, Fate.CONVERTED, Fate.COPIED}


def test_glm_5_has_no_embedding_in_its_mtp_layer() -> None:
    name = "model.layers.3.embed_tokens.weight"
    (problem,) = scan(with_tensor(tiny("glm-5.2-fp8"), name, "BF16", (512, 256))).problems
    assert_refusal(problem, UnknownTensorError, name)


def test_the_vision_tower_comes_along_as_it_is() -> None:
    checkpoint = tiny("kimi-k2.6-int4")
    for name, shape in VISION.items():
        checkpoint = with_tensor(checkpoint, name, "BF16", shape)
    plan = plan_of(checkpoint, "kimi-k2.6")
    vision = {t.source.spec.name: t for t in plan.tensors if t.source.spec.role == "vision"}
    assert {name: t.source.spec.shape for name, t in vision.items()} == VISION
    assert {t.fate for t in vision.values()} == {Fate.COPIED}
    assert {name for name, t in vision.items() if t.source.spec.is_linear} == {
        "vision_tower.encoder.blocks.0.wqkv.weight",
        "mm_projector.proj.0.weight",
    }
    assert {str(t.source.spec.tp.axis) for t in vision.values()} == {"replicated"}


def test_a_vision_tower_in_a_text_model_is_unknown() -> None:
    name = "vision_tower.encoder.blocks.0.wqkv.weight"
    (problem,) = scan(with_tensor(tiny("kimi-k2-instruct-fp8"), name, "BF16", (96, 32))).problems
    assert_refusal(problem, UnknownTensorError, name, "kimi_k2 does not know it")


@pytest.mark.parametrize("prefix", ["language_model.", ""])
def test_rotary_buffers_are_dropped_with_a_reason_and_kept_by_copy(prefix: str) -> None:
    name = "kimi-k2.6-int4" if prefix else "kimi-k2-instruct-fp8"
    checkpoint = with_tensor(tiny(name), prefix + INV_FREQ, "F32", (8,))
    assert source_of(checkpoint, prefix + INV_FREQ).spec.role == "buffer"
    for by, fate in (("dequantize", Fate.DROPPED), ("copy", Fate.COPIED)):
        plan = plan_of(checkpoint, by)
        (buffer,) = [t for t in plan.tensors if t.source.spec.role == "buffer"]
        assert buffer.fate is fate
        written = {header.name for unit in plan.units for header in unit.layout}
        assert (prefix + INV_FREQ in written) == (fate is Fate.COPIED)
        assert bool(buffer.reason) == (fate is Fate.DROPPED)
        assert sum(plan.fate_counts.values()) == len(plan.tensors)
        assert any(b'"reason": "a buffer' in line for line in plan.blank_ledger()) == (fate is Fate.DROPPED)


def test_a_rule_for_buffers_may_keep_them() -> None:
    checkpoint = with_tensor(tiny("kimi-k2-instruct-fp8"), INV_FREQ, "F32", (8,))
    plan = plan_of(checkpoint, recipe({"roles": ["buffer"], "format": "keep"}))
    (buffer,) = [t for t in plan.tensors if t.source.spec.role == "buffer"]
    assert buffer.fate is Fate.COPIED
