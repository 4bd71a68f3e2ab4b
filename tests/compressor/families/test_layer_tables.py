"""Every family's tensors, layer by layer, in the published sizes: name, shape, role and tensor-parallel cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tiny_checkpoints import CONFIGS
from tiny_plans import checkpoint_of, specs_of

from memopt.compressor.families.roles import TensorSpec, TpAxis

NORMS = """
input_layernorm.weight                      6144         norm             replicated
post_attention_layernorm.weight             6144         norm             replicated
"""
GLM5_ATTENTION = """
self_attn.q_a_proj.weight                   2048x6144    attention        replicated     fp8
self_attn.q_a_layernorm.weight              2048         norm             replicated
self_attn.q_b_proj.weight                   16384x2048   attention        rows/256       fp8
self_attn.kv_a_proj_with_mqa.weight         576x6144     attention        replicated     fp8
self_attn.kv_a_layernorm.weight             512          norm             replicated
self_attn.kv_b_proj.weight                  28672x512    kv_b             rows/448       fp8
self_attn.o_proj.weight                     6144x16384   attention        columns/256    fp8
"""
GLM5_INDEXER = """
self_attn.indexer.wq_b.weight               4096x2048    indexer          replicated     fp8
self_attn.indexer.wk.weight                 128x6144     indexer          replicated     fp8
self_attn.indexer.weights_proj.weight       32x6144      indexer_weights  replicated
self_attn.indexer.k_norm.weight             128          norm             replicated
self_attn.indexer.k_norm.bias               128          norm             replicated
"""
GLM5_DENSE = """
mlp.gate_proj.weight                        12288x6144   dense_mlp        rows/1         fp8
mlp.up_proj.weight                          12288x6144   dense_mlp        rows/1         fp8
mlp.down_proj.weight                        6144x12288   dense_mlp        columns/1      fp8
"""
GLM5_MOE = """
mlp.gate.weight                             2x6144       router           replicated
mlp.gate.e_score_correction_bias            2            router_bias      replicated
mlp.experts.0.gate_proj.weight              2048x6144    routed_expert    rows/1         fp8
mlp.experts.0.up_proj.weight                2048x6144    routed_expert    rows/1         fp8
mlp.experts.0.down_proj.weight              6144x2048    routed_expert    columns/1      fp8
mlp.experts.1.gate_proj.weight              2048x6144    routed_expert    rows/1         fp8
mlp.experts.1.up_proj.weight                2048x6144    routed_expert    rows/1         fp8
mlp.experts.1.down_proj.weight              6144x2048    routed_expert    columns/1      fp8
mlp.shared_experts.gate_proj.weight         2048x6144    shared_expert    rows/1         fp8
mlp.shared_experts.up_proj.weight           2048x6144    shared_expert    rows/1         fp8
mlp.shared_experts.down_proj.weight         6144x2048    shared_expert    columns/1      fp8
"""
MTP = """
enorm.weight                                6144         norm             replicated
hnorm.weight                                6144         norm             replicated
eh_proj.weight                              6144x12288   mtp_projection   replicated
shared_head.norm.weight                     6144         norm             replicated
"""
GLM4_ATTENTION = """
self_attn.q_proj.weight                     12288x5120   attention        rows/128       fp8
self_attn.q_proj.bias                       12288        attention_bias   rows/128
self_attn.k_proj.weight                     1024x5120    attention        rows/128       fp8
self_attn.k_proj.bias                       1024         attention_bias   rows/128
self_attn.v_proj.weight                     1024x5120    attention        rows/128       fp8
self_attn.v_proj.bias                       1024         attention_bias   rows/128
self_attn.o_proj.weight                     5120x12288   attention        columns/128    fp8
self_attn.q_norm.weight                     128          norm             replicated
self_attn.k_norm.weight                     128          norm             replicated
"""
KIMI_ATTENTION = """
self_attn.q_a_proj.weight                   1536x7168    attention        replicated     fp8
self_attn.q_a_layernorm.weight              1536         norm             replicated
self_attn.q_b_proj.weight                   12288x1536   attention        rows/192       fp8
self_attn.kv_a_proj_with_mqa.weight         576x7168     attention        replicated     fp8
self_attn.kv_a_layernorm.weight             512          norm             replicated
self_attn.kv_b_proj.weight                  16384x512    kv_b             rows/256       fp8
self_attn.o_proj.weight                     7168x8192    attention        columns/128    fp8
"""
KIMI_DENSE = """
mlp.gate_proj.weight                        18432x7168   dense_mlp        rows/1         fp8
mlp.up_proj.weight                          18432x7168   dense_mlp        rows/1         fp8
mlp.down_proj.weight                        7168x18432   dense_mlp        columns/1      fp8
"""
OWN_HEAD = """
shared_head.head.weight                     {vocab}x{hidden}  mtp_head    rows/1         optional
embed_tokens.weight                         {vocab}x{hidden}  mtp_head    rows/1         optional
"""


def rows(text: str, **sizes: int) -> list[str]:
    for before, after in sizes.items():
        text = text.replace(f"{{{before}}}", str(after))
    return sorted(" ".join(line.split()) for line in text.splitlines() if line.strip())


def with_hidden(text: str, hidden: int, moe: int) -> str:
    """A table in GLM-5's sizes (hidden 6144, experts 2048) for other ones."""
    return text.replace("12288", str(2 * hidden)).replace("6144", str(hidden)).replace("2048", str(moe))


def row(spec: TensorSpec, prefix: str) -> str:
    cut = str(spec.tp.axis) if spec.tp.axis is TpAxis.REPLICATED else f"{spec.tp.axis}/{spec.tp.unit}"
    shape = "x".join(map(str, spec.shape))
    marks = ["fp8"] * spec.is_published_quantized + ["optional"] * (not spec.is_required)
    return " ".join([spec.name.removeprefix(prefix), shape, str(spec.role), cut, *marks])


def small(name: str, **changes: Any) -> dict[str, TensorSpec]:
    """The specs of a published config with its real widths, few layers and two experts."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    config.get("text_config", config).update({"n_routed_experts": 2, "num_hidden_layers": 4, **changes})
    return specs_of(checkpoint_of(config))


def layer(specs: dict[str, TensorSpec], number: int, prefix: str = "model") -> list[str]:
    start = f"{prefix}.layers.{number}."
    chosen = [spec for name, spec in specs.items() if name.startswith(start)]
    assert {spec.layer for spec in chosen} == {number}
    return sorted(row(spec, start) for spec in chosen)


def test_glm_5_2_layers() -> None:
    specs = small("glm-5.2-fp8", indexer_types=["full", "full", "full", "shared"])
    assert layer(specs, 0) == rows(NORMS + GLM5_ATTENTION + GLM5_INDEXER + GLM5_DENSE)
    assert layer(specs, 3) == rows(NORMS + GLM5_ATTENTION + GLM5_MOE)
    assert layer(specs, 4) == rows(NORMS + GLM5_ATTENTION + GLM5_INDEXER + GLM5_MOE + MTP)
    assert {spec.is_mtp for spec in specs.values() if spec.layer == 4} == {True}


def test_glm_5_1_has_an_indexer_in_every_layer() -> None:
    assert layer(small("glm-5.1-fp8"), 3) == rows(NORMS + GLM5_ATTENTION + GLM5_INDEXER + GLM5_MOE)


def test_glm_4_7_layers() -> None:
    specs = small("glm-4.7-fp8")
    norms, moe, mtp = (with_hidden(table, 5120, 1536) for table in (NORMS, GLM5_MOE, MTP))
    assert layer(specs, 3) == rows(norms + GLM4_ATTENTION + moe)
    assert layer(specs, 4) == rows(norms + GLM4_ATTENTION + moe + mtp + OWN_HEAD, vocab=151_552, hidden=5120)


@pytest.mark.parametrize(("name", "prefix"), [("kimi-k2-instruct-fp8", ""), ("kimi-k2.6-int4", "language_model.")])
def test_kimi_layers(name: str, prefix: str) -> None:
    specs = small(name)
    norms, moe = (with_hidden(table, 7168, 2048) for table in (NORMS, GLM5_MOE))
    assert layer(specs, 0, f"{prefix}model") == rows(norms + KIMI_ATTENTION + KIMI_DENSE)
    assert layer(specs, 1, f"{prefix}model") == rows(norms + KIMI_ATTENTION + moe)


def test_deepseek_v3_is_kimi_with_an_mtp_layer_of_its_own_head() -> None:
    changes = {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1, "vocab_size": 129_280}
    specs = small("kimi-k2-instruct-fp8", **changes)
    norms, moe, mtp = (with_hidden(table, 7168, 2048) for table in (NORMS, GLM5_MOE, MTP))
    assert layer(specs, 4) == rows(norms + KIMI_ATTENTION + moe + mtp + OWN_HEAD, vocab=129_280, hidden=7168)


@pytest.mark.parametrize(
    ("name", "prefix", "vocab", "hidden"),
    [
        ("glm-5.2-fp8", "", 154_880, 6144),
        ("glm-4.7-fp8", "", 151_552, 5120),
        ("kimi-k2-instruct-fp8", "", 163_840, 7168),
        ("kimi-k2.6-int4", "language_model.", 163_840, 7168),
    ],
)
def test_what_stands_outside_the_layers(name: str, prefix: str, vocab: int, hidden: int) -> None:
    changes = {"indexer_types": ["full"] * 4} if name == "glm-5.2-fp8" else {}
    outside = [spec for spec in small(name, **changes).values() if spec.layer is None]
    assert sorted(row(spec, prefix) for spec in outside) == sorted(
        [
            f"model.embed_tokens.weight {vocab}x{hidden} embedding rows/1",
            f"model.norm.weight {hidden} norm replicated",
            f"lm_head.weight {vocab}x{hidden} lm_head rows/1",
        ]
    )


def test_mla_without_a_query_rank_has_one_query_projection() -> None:
    specs = small("kimi-k2-instruct-fp8", q_lora_rank=None)
    queries = [line for line in layer(specs, 1) if ".q_" in line]
    assert queries == ["self_attn.q_proj.weight 12288x7168 attention rows/192 fp8"]


def test_no_bias_and_no_query_norm_where_the_config_says_so() -> None:
    specs = small("glm-4.7-fp8", attention_bias=False, use_qk_norm=False)
    attention = [line for line in layer(specs, 3) if line.startswith("self_attn")]
    assert attention == [line for line in rows(GLM4_ATTENTION) if "bias" not in line and "_norm" not in line]


def test_shared_experts_are_as_many_wide_or_absent() -> None:
    double = layer(small("glm-4.7-fp8", n_shared_experts=2), 3)
    assert "mlp.shared_experts.gate_proj.weight 3072x5120 shared_expert rows/1 fp8" in double
    assert not [line for line in layer(small("glm-4.7-fp8", n_shared_experts=0), 3) if "shared_experts" in line]
