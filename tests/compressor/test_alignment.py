"""Tensor-parallel cuts: whole heads, whole INT4 groups and words, whole FP8 blocks; else a refusal with the choices."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal
from tiny_checkpoints import CONFIGS
from tiny_plans import INT4_EXPERTS, checkpoint_of, plan_of, recipe

from memopt.compressor.alignment import can_cut, cut_error, divides
from memopt.compressor.checkpoint.checkpoint import Checkpoint
from memopt.compressor.families.roles import REPLICATED, Role, TensorSpec, TpAxis, TpRule
from memopt.compressor.plan import Plan
from memopt.errors import AlignmentError, UsageError
from memopt.manifests.rank_folders import RankLayout

DOWN = "model.layers.3.mlp.experts.0.down_proj.weight"


def small(name: str, **changes: Any) -> Checkpoint:
    """A published config with its real widths, but four layers of two experts."""
    table = json.loads((CONFIGS / f"{name}.json").read_text())
    table.get("text_config", table).update({"n_routed_experts": 2, "num_hidden_layers": 4, **changes})
    return checkpoint_of(table)


def plan_experts(checkpoint: Checkpoint, group_size: int | str, degree: int, **fields: Any) -> Plan:
    rule = {"roles": ["routed_expert"], "format": {"type": "int4", "group_size": group_size}}
    return plan_of(checkpoint, recipe(rule, **fields), tensor_parallel=degree)


GLM_4_5_AIR = {
    "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408, "vocab_size": 151_552,
    "first_k_dense_replace": 1, "use_qk_norm": False,
}  # fmt: skip


TP8_CHOICES = "(legal: tensor-parallel 1, 2, 4 with group 128; tensor-parallel 8 with group 32 or 64)"


def test_glm_4_7_at_tp8_refuses_group_128_and_names_the_choices() -> None:
    checkpoint = small("glm-4.7-fp8")
    with refusal(AlignmentError, DOWN, "1536 columns / 8 ranks = 192", "groups of 128", TP8_CHOICES):
        plan_experts(checkpoint, 128, 8)
    for group in (32, 64, "channel"):
        assert plan_experts(checkpoint, group, 8).tensor_parallel == 8
    assert plan_experts(checkpoint, 128, 4).tensor_parallel == 4


def test_glm_4_5_air_has_no_group_at_tp8_and_32_alone_at_tp4() -> None:
    checkpoint = small("glm-4.7-fp8", **GLM_4_5_AIR)
    name = DOWN.replace("layers.3", "layers.1")
    for group in (32, 64):
        with refusal(AlignmentError, name, "1408 columns / 8 ranks = 176", f"groups of {group}", "4 with group 32)"):
            plan_experts(checkpoint, group, 8)
    assert plan_experts(checkpoint, 32, 4).tensor_parallel == 4
    with refusal(
        AlignmentError,
        name,
        "1408 columns / 4 ranks = 352",
        "groups of 64",
        "parallel 1, 2 with group 64; tensor-parallel 4 with group 32)",
    ):
        plan_experts(checkpoint, 64, 4)
    with refusal(AlignmentError, name, "1408 columns / 8 ranks = 176", "groups of 128"):
        plan_experts(checkpoint, 128, 8)


def test_glm_4_5_air_at_tp8_is_offered_tp4_with_group_32_or_whole_experts() -> None:
    checkpoint = small("glm-4.7-fp8", **GLM_4_5_AIR, n_routed_experts=8)
    name = DOWN.replace("layers.3", "layers.1")
    for group in (32, 64, 128):
        with refusal(AlignmentError, name, "176", "4 with group 32; or expert-parallel 8)"):
            plan_experts(checkpoint, group, 8)
    for group in (32, 64, 128):
        rule = {"roles": ["routed_expert"], "format": {"type": "int4", "group_size": group}}
        assert plan_of(checkpoint, recipe(rule), expert_parallel=8).layouts.names == ("hub", "ep8")
    # Not where the shared expert, which is cut all the same, has no more columns.
    rule = {"roles": ["routed_expert", "shared_expert"], "format": {"type": "int4", "group_size": 32}}
    with refusal(AlignmentError, name, "(legal: tensor-parallel 1, 2, 4 with group 32)"):
        plan_of(checkpoint, recipe(rule), tensor_parallel=8)
    rule["format"] = {"type": "int4", "group_size": 64}
    legal = "(legal: expert-parallel 1, 2 with group 64; expert-parallel 4 with group 32)"
    with refusal(AlignmentError, "shared_experts.down_proj", legal):
        plan_of(checkpoint, recipe(rule), expert_parallel=8)
    # Not where there are fewer experts than ranks.
    with pytest.raises(AlignmentError) as caught:
        plan_experts(small("glm-4.7-fp8", **GLM_4_5_AIR), 32, 8)
    assert "expert-parallel" not in str(caught.value)


def test_experts_are_never_cut_by_expert_parallel_ranks() -> None:
    checkpoint = small("glm-4.7-fp8", **GLM_4_5_AIR, n_routed_experts=12)
    with refusal(AlignmentError, "experts.0.gate_proj", "12 experts / 8 ranks = 1.5", "expert-parallel 1, 2, 4"):
        plan_of(checkpoint, recipe(INT4_EXPERTS), expert_parallel=8)
    # The rest is cut as by tensor-parallel ranks, and refused as there.
    with refusal(AlignmentError, "k_proj", "1024 rows / 16 ranks", "heads of 128"):
        plan_of(small("glm-4.7-fp8", n_routed_experts=16), "dequantize", expert_parallel=16)


def test_a_group_that_does_not_divide_the_tensor_itself() -> None:
    checkpoint = small("glm-4.7-fp8", moe_intermediate_size=1440)
    with refusal(AlignmentError, DOWN, "1440 columns", "group 64", "legal groups: 32"):
        plan_experts(checkpoint, 64, 1)


@pytest.mark.parametrize(
    ("group", "degrees"), [(128, [1, 2, 4, 8, 16]), (64, [1, 2, 4, 8, 16, 32]), (32, [1, 2, 4, 8, 16, 32, 64])]
)
def test_experts_of_2048_in_whole_groups(group: int, degrees: list[int]) -> None:
    spec = TensorSpec(DOWN, (6144, 2048), Role.ROUTED_EXPERT, TpRule(TpAxis.COLUMNS), is_linear=True)
    assert [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if divides(spec, n, weights_per_scale=group)] == degrees


def test_channel_groups_ask_for_whole_words_only() -> None:
    spec = TensorSpec(DOWN, (6144, 1408), Role.ROUTED_EXPERT, TpRule(TpAxis.COLUMNS))
    assert [n for n in (1, 2, 4, 8, 16, 32) if divides(spec, n, weights_per_scale=1408)] == [1, 2, 4, 8, 16]
    text = str(cut_error(spec, RankLayout("tp", 32), [1, 16], weights_per_scale=1408))
    assert "1408 columns / 32 ranks = 44: cannot be cut in whole words of 8 INT4 codes" in text
    assert text.endswith("(legal: tensor-parallel 1, 16)")


def test_kept_fp8_blocks_are_never_cut() -> None:
    checkpoint = small("glm-5.1-fp8")
    # Experts (copied) and shared experts (kept beside INT4): 2048 rows / 32 ranks = 64, half a block.
    for by, name in (("copy", "mlp.experts.0.gate_proj"), ("glm-5.2-int4-fp8", "mlp.shared_experts.gate_proj")):
        with refusal(AlignmentError, name, "2048 rows / 32 ranks = 64", "blocks of 128x128"):
            plan_of(checkpoint, by, tensor_parallel=32)
        assert plan_of(checkpoint, by, tensor_parallel=16).tensor_parallel == 16
    # Nothing is FP8 any more: the same degree is fine.
    assert plan_of(checkpoint, "glm-5.1-int4", tensor_parallel=32).tensor_parallel == 32


def test_fp8_blocks_of_kv_b_need_two_heads_a_rank() -> None:
    # A head of GLM-5 has 448 rows: 3.5 blocks.
    spec = TensorSpec("kv_b", (28_672, 512), Role.KV_B, TpRule(TpAxis.ROWS, 448))
    assert [n for n in (8, 16, 32, 64) if divides(spec, n, block=(128, 128))] == [8, 16, 32]
    assert [n for n in (8, 16, 32, 64, 128) if divides(spec, n)] == [8, 16, 32, 64]
    ranks = RankLayout("tp", 64)
    assert not can_cut(spec, ranks, block=(128, 128))
    text = str(cut_error(spec, ranks, [1, 32], block=(128, 128)))
    assert "kv_b: 28672 rows / 64 ranks = 448: cannot be cut in whole FP8 blocks of 128x128" in text
    assert "(legal: tensor-parallel 1, 32)" in text


def test_fp8_blocks_of_a_down_projection_are_cut_by_columns() -> None:
    spec = TensorSpec("down", (6144, 1536), Role.ROUTED_EXPERT, TpRule(TpAxis.COLUMNS))
    assert [n for n in (1, 2, 4, 8, 16) if divides(spec, n, block=(128, 128))] == [1, 2, 4]
    text = str(cut_error(spec, RankLayout("tp", 8), [], block=(128, 128)))
    assert "down: 1536 columns / 8 ranks = 192: cannot be cut in whole FP8 blocks of 128x128" in text
    # One scale a row reaches over all columns, so that it cuts none.
    assert divides(spec, 8, block=(1, 1536))


def test_glm_4_7_channel_fp8_may_be_cut_where_blocks_may_not() -> None:
    assert plan_of(small("glm-4.7-fp8"), "copy", tensor_parallel=8).tensor_parallel == 8


def test_heads_are_never_cut() -> None:
    checkpoint = small("glm-4.7-fp8")
    with refusal(AlignmentError, "model.layers.0.self_attn.k_proj.weight", "1024 rows / 16 ranks", "heads of 128"):
        plan_of(checkpoint, "dequantize", tensor_parallel=16)
    fewer = small("glm-4.7-fp8", num_key_value_heads=4)
    with refusal(AlignmentError, "k_proj", "heads of 128 (4 in all", "engines repeat", "tensor-parallel 1, 2, 4)"):
        plan_of(fewer, "glm-4.7-int4")


def test_only_key_value_heads_are_repeated_by_engines() -> None:
    with refusal(AlignmentError, "self_attn.q_proj", "heads of 128 (96 in all) (legal: tensor-parallel 1, 2, 4, 8)"):
        plan_of(small("glm-4.7-fp8", vocab_size=19_200), "dequantize", tensor_parallel=128)


def test_an_odd_degree_is_refused_at_the_first_tensor_and_offered_what_all_tensors_allow() -> None:
    """The vocabulary would divide by 64; there are eight key/value heads."""
    checkpoint = small("glm-4.7-fp8", n_routed_experts=4)
    name = "model.embed_tokens.weight"
    with refusal(AlignmentError, name, "151552 rows / 3 ranks", "(legal: tensor-parallel 1, 2, 4, 8)"):
        plan_of(checkpoint, "dequantize", tensor_parallel=3)
    with refusal(AlignmentError, name, "151552 rows / 3 ranks", "(legal: expert-parallel 1, 2, 4)"):
        plan_of(checkpoint, "dequantize", expert_parallel=3)


@pytest.mark.parametrize("kind", ["tp", "ep"])
def test_what_is_offered_is_accepted(kind: str) -> None:
    option = {"tp": "tensor_parallel", "ep": "expert_parallel"}[kind]
    checkpoint = small("glm-4.7-fp8", **GLM_4_5_AIR, n_routed_experts=12)
    with pytest.raises(AlignmentError) as caught:
        plan_of(checkpoint, recipe(INT4_EXPERTS), **{option: 7})
    offered = re.search(r"parallel ([0-9, ]+)", str(caught.value.remedy))
    assert offered is not None
    degrees = [int(text) for text in offered[1].split(",")]
    assert degrees == [1, 2, 4]
    for degree in degrees:
        assert plan_of(checkpoint, recipe(INT4_EXPERTS), **{option: degree}).units


@pytest.mark.parametrize("degree", [0, -8])
@pytest.mark.parametrize("kind", ["tensor", "expert"])
def test_a_degree_below_one_is_a_usage_error(kind: str, degree: int) -> None:
    with refusal(UsageError, f"{kind}-parallel degree {degree}", "not positive"):
        plan_of(small("glm-4.7-fp8"), recipe(INT4_EXPERTS), **{f"{kind}_parallel": degree})


# Sizes that divide in many ways are the interesting ones.
SIZES = st.integers(1, 4096) | st.builds(
    lambda n, unit: n * unit, st.integers(1, 32), st.sampled_from([8, 32, 64, 128])
)
SPECS = st.builds(
    TensorSpec,
    name=st.just("t.weight"),
    shape=st.tuples(SIZES, SIZES),
    role=st.just(Role.ATTENTION),
    tp=st.builds(TpRule, st.sampled_from(TpAxis), st.sampled_from([1, 8, 64, 128])),
)


@given(
    spec=SPECS,
    degree=st.integers(1, 8) | st.sampled_from([16, 32, 64]),
    group=st.sampled_from([None, 32, 64, 128]),
    block=st.sampled_from([None, (128, 128), (1, 4096)]),
)
@settings(max_examples=300, deadline=None)
def test_a_cut_that_is_allowed_leaves_nothing_in_two(
    spec: TensorSpec, degree: int, group: int | None, block: tuple[int, int] | None
) -> None:
    is_allowed = divides(spec, degree, weights_per_scale=group, block=block)
    if spec.tp.axis is TpAxis.REPLICATED or degree == 1:
        assert is_allowed
        return
    axis = 0 if spec.tp.axis is TpAxis.ROWS else 1
    share, rest = divmod(spec.shape[axis], degree)
    is_whole = rest == 0 and share % spec.tp.unit == 0
    if group is not None and axis == 1:
        is_whole &= share % (8 if group == spec.shape[1] else group) == 0
    if block is not None and block[axis] < spec.shape[axis]:
        is_whole &= share % block[axis] == 0
    assert is_allowed == is_whole


def test_replicated_tensors_suit_every_degree() -> None:
    spec = TensorSpec("n", (7,), Role.NORM, REPLICATED)
    assert all(divides(spec, degree) for degree in range(1, 20))
