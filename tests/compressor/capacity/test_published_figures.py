"""The published capacity figures, reproduced from the configs alone (docs/capacity.md says with what assumptions)."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_plans import plan_of, published

from memopt.compressor.capacity.capacity_plan import CapacityPlan, StageCapacity, plan_capacity
from memopt.compressor.capacity.gpus import GIB, gpu_named
from memopt.compressor.capacity.kv_bytes import CacheFormat
from memopt.compressor.capacity.request import CapacityRequest
from memopt.compressor.plan import Plan

H200 = gpu_named("h200")


@pytest.fixture(scope="module")
def glm() -> Plan:
    """GLM-5.2 FP8 by its default recipe. Let go after this module: so many live objects slow the tests after it."""
    return plan_of(published("glm-5.2-fp8"), "glm-5.2-int4", tensor_parallel=8)


@pytest.fixture(scope="module")
def kimi() -> Plan:
    return plan_of(published("kimi-k2.6-int4"), "kimi-k2.6", tensor_parallel=8)


def capacity_of(plan: Plan, **request: Any) -> CapacityPlan:
    return plan_capacity(plan, CapacityRequest(**request))


def only(plan: CapacityPlan) -> StageCapacity:
    (stage,) = plan.stages
    return stage


def gib(size_bytes: float) -> float:
    return round(size_bytes / GIB, 1)


def test_glm_5_2_weights(glm: Plan) -> None:
    decode, prefill = (stage.weights for stage in capacity_of(glm, stage="both").stages)
    # The checkpoint, published as 705 -> 421.
    assert gib(prefill.checkpoint_size_bytes(is_mtp_on=True)) == 703.7
    assert gib(decode.checkpoint_size_bytes(is_mtp_on=True)) == 419.9
    # A GPU at TP8, published as 88 -> 52: a plain division, then true bytes without and with the MTP layer.
    assert [gib(w.checkpoint_size_bytes(is_mtp_on=True) / 8) for w in (prefill, decode)] == [88.0, 52.5]
    assert [gib(w.size_bytes(is_mtp_on=False)) for w in (prefill, decode)] == [88.2, 54.4]
    assert [gib(w.size_bytes(is_mtp_on=True)) for w in (prefill, decode)] == [89.5, 55.2]
    with_copies = prefill.size_bytes(is_mtp_on=False) + prefill.absorbed_size_bytes(is_mtp_on=False)
    assert with_copies / GIB == pytest.approx(88.45, abs=0.005)


def glm_5_2_rank_bytes(expert_format: str, other_format: str) -> tuple[int, int]:
    """Bytes of one of 8 ranks, without and with the MTP layer: counted from the table of shapes, not from the plan."""
    hidden, num_ranks = 6144, 8

    def linear(form: str, rows: int, columns: int, ranks: int = num_ranks) -> int:
        if form == "bf16":
            return rows * columns * 2 // ranks
        if form == "fp8":
            return (rows * columns + -(-rows // 128) * -(-columns // 128) * 4) // ranks
        # INT4 in groups of 32 with BF16 scales, and the pair of int64 that says the shape.
        return (rows * columns // 2 + rows * columns // 32 * 2) // ranks + 16

    def mlp(form: str, size: int) -> int:
        return 2 * linear(form, size, hidden) + linear(form, hidden, size)

    attention = (
        linear(other_format, 2048, hidden, 1) + 2048 * 2 + linear(other_format, 16384, 2048)
        + linear(other_format, 576, hidden, 1) + 512 * 2 + linear(other_format, 28672, 512)
        + linear(other_format, hidden, 16384) + 2 * hidden * 2
    )  # fmt: skip
    indexer = linear(other_format, 4096, 2048, 1) + linear(other_format, 128, hidden, 1) + 32 * hidden * 2 + 2 * 128 * 2
    moe = 256 * mlp(expert_format, 2048) + mlp(other_format, 2048) + 256 * hidden * 2 + 256 * 4
    layers = 78 * attention + 21 * indexer + 3 * mlp(other_format, 12288) + 75 * moe
    without_mtp = layers + 2 * 154880 * hidden * 2 // num_ranks + hidden * 2
    return without_mtp, without_mtp + attention + indexer + moe + hidden * 2 * hidden * 2 + 3 * hidden * 2


def test_glm_5_2_bytes_of_a_rank_are_those_of_its_shapes(glm: Plan) -> None:
    decode, prefill = (stage.weights for stage in capacity_of(glm, stage="both").stages)
    for weights, formats in ((decode, ("int4", "bf16")), (prefill, ("fp8", "fp8"))):
        expected = glm_5_2_rank_bytes(*formats)
        assert (weights.size_bytes(is_mtp_on=False), weights.size_bytes(is_mtp_on=True)) == expected


def test_glm_5_2_has_room_for_1_18_million_tokens(glm: Plan) -> None:
    request = {"gpu": H200, "weights_per_gpu_bytes": 52 * GIB, "memory_fraction": 0.85, "indexer_cache": "all"}
    stage = only(capacity_of(glm, **request))
    assert (stage.token.format, stage.token.size_bytes) == (CacheFormat.FP8_DS_MLA, 61_464)
    assert stage.tokens == 1_176_384
    assert stage.tokens == pytest.approx(1.18e6, rel=0.01)
    # The reserves fit into what the fraction leaves, so the figure does not hang on them.
    assert stage.memory is not None
    assert not stage.memory.is_limited_by_reserves


def test_glm_5_2_by_its_true_bytes_and_vllms_indexer_cache(glm: Plan) -> None:
    true, own = (only(capacity_of(glm, gpu=H200, indexer_cache=cache)) for cache in ("all", "own"))
    assert (true.tokens, own.tokens) == (1_130_560, 1_288_256)


@pytest.mark.parametrize(("form", "bytes_a_token", "tokens"), [("bf16", 70_272, 686e3), ("fp8_e4m3", 35_136, 1.37e6)])
def test_kimi_k2_6_tokens_in_44_9_gib(kimi: Plan, form: str, bytes_a_token: int, tokens: float) -> None:
    stage = only(capacity_of(kimi, kv_pool_bytes=int(44.9 * GIB), kv_format=CacheFormat(form)))
    assert stage.token.size_bytes == bytes_a_token
    assert stage.tokens == pytest.approx(tokens, rel=0.005)


def test_kimi_k2_6_on_an_h200(kimi: Plan) -> None:
    # 686 k BF16 tokens leave 74.4 GiB of 0.85 of an H200: the text model's 71.0 GiB, and a vision tower beside.
    stage = only(capacity_of(kimi, gpu=H200, kv_format=CacheFormat.BF16))
    assert gib(stage.weights.size_bytes(is_mtp_on=False)) == 71.0
    assert gib(0.85 * H200.memory_bytes - 686_000 * stage.token.size_bytes) == 74.4
    assert stage.tokens is not None
    assert stage.tokens > 686_000
