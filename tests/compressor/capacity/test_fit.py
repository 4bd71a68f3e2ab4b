"""What does not fit is refused, with what would."""

from __future__ import annotations

import json
from typing import Any

import pytest
from refusals import refusal
from tiny_checkpoints import CONFIGS
from tiny_plans import checkpoint_of, plan_of, tiny

from memopt.compressor.capacity.capacity_plan import CapacityPlan, plan_capacity
from memopt.compressor.capacity.gpus import GIB, Gpu, gpu_named
from memopt.compressor.capacity.kv_bytes import CacheFormat
from memopt.compressor.capacity.request import CapacityRequest, ReserveChoice
from memopt.compressor.plan import Plan
from memopt.errors import AlignmentError, CapacityError, RecipeError, UsageError


@pytest.fixture(scope="module")
def plan() -> Plan:
    """GLM-5.2 with its true widths, 32 experts of 256 and 8 of a token: a tenth of the weights, quick to plan."""
    table = json.loads((CONFIGS / "glm-5.2-fp8.json").read_text()) | {"n_routed_experts": 32}
    return plan_of(checkpoint_of(table), "glm-5.2-int4", tensor_parallel=8)


def capacity(plan: Plan, **request: Any) -> CapacityPlan:
    return plan_capacity(plan, CapacityRequest(**request))


def test_a_gpu_too_small_is_refused_with_degrees_and_gpus_that_would_do(plan: Plan) -> None:
    small = Gpu("given", 16 * GIB)
    with refusal(
        CapacityError, "decode: 12.9 GiB of weights a GPU", "given has 16.0 GiB", "10.1 GiB of reserves leave 5.9 GiB",
        "would fit: 8 of l40s, h100, a100, h20, rtx-pro-6000, h200, b200, gb200, mi300x, mi325x, b300, gb300",
        "or smaller reserves (--reserve-activations",
    ):  # fmt: skip
        capacity(plan, gpu=small)
    fits_nowhere = ReserveChoice(activations=400 * GIB)
    with refusal(CapacityError, "leave nothing for", "no degree and no GPU that memopt knows would fit"):
        capacity(plan, gpu=small, reserves=fits_nowhere)


def test_smaller_reserves_are_offered_only_where_they_help(plan: Plan) -> None:
    for size_gib, helps in ((16, True), (14, False)):
        with pytest.raises(CapacityError) as caught:
            capacity(plan, gpu=Gpu("given", size_gib * GIB))
        assert ("smaller reserves" in caught.value.remedy) is helps
    nothing = ReserveChoice(0, 0, 0, 0, 0)
    assert capacity(plan, gpu=Gpu("given", 16 * GIB), reserves=nothing).stages[0].tokens


def test_more_ranks_are_offered_only_where_they_divide_and_help(plan: Plan) -> None:
    small = Gpu("given", 12 * GIB)
    none = ReserveChoice(0, 0, 0, 0, 0)
    with refusal(CapacityError, "a fraction of 0.85 leaves 10.2 GiB", "16, 32, 64 ranks of this GPU"):
        capacity(plan, gpu=small, reserves=none)
    # Weights that are given are not planned anew for more ranks.
    with refusal(CapacityError, "would fit: 8 of l40s"):
        capacity(plan, gpu=small, reserves=none, weights_per_gpu_bytes=30 * GIB)
    with refusal(CapacityError, "(no GPU that memopt knows would fit)"):
        capacity(plan, gpu=small, reserves=none, weights_per_gpu_bytes=500 * GIB)


def test_the_offered_degree_fits(plan: Plan) -> None:
    small, none = Gpu("given", 12 * GIB), ReserveChoice(0, 0, 0, 0, 0)
    wider = plan_of(plan.source, "glm-5.2-int4", tensor_parallel=16)
    (stage,) = capacity(wider, gpu=small, reserves=none).stages
    assert stage.tokens is not None
    assert stage.tokens >= 64


def test_a_length_above_the_models_maximum_is_refused(plan: Plan) -> None:
    with refusal(CapacityError, "1,048,577", "maximum of 1,048,576", "max_position_embeddings", "at most 1,048,576"):
        capacity(plan, context=1_048_577)
    assert capacity(plan, context=1_048_576).stages[0].requests is None


def test_more_requests_than_fit_are_refused_with_those_that_do(plan: Plan) -> None:
    (stage,) = capacity(plan, gpu=gpu_named("h100"), context=8192).stages
    assert stage.requests is not None
    fits = capacity(plan, gpu=gpu_named("h100"), context=8192, requests=stage.requests)
    assert fits.stages[0].requests == stage.requests
    with refusal(
        CapacityError, f"decode: {stage.requests + 1} requests of 8,192 tokens", f"{stage.requests} of that length",
        "h200",
    ):  # fmt: skip
        capacity(plan, gpu=gpu_named("h100"), context=8192, requests=stage.requests + 1)
    with refusal(CapacityError, "2 requests of 1,000 tokens need 2,048 tokens", "1,024 fit", "2 of 512 tokens"):
        capacity(plan, kv_pool_bytes=1024 * 61_464, context=1000, requests=2)


def test_a_pool_that_was_given_is_told_what_would_hold_the_requests(plan: Plan) -> None:
    with refusal(
        CapacityError, "1 request of 10 tokens needs 64 tokens", "0 fit", f"a KV pool of {64 * 61_464:,} bytes"
    ):
        capacity(plan, kv_pool_bytes=0, context=10)
    assert capacity(plan, kv_pool_bytes=64 * 61_464, context=10).stages[0].requests == 1


def test_a_pool_that_was_given_must_fit_beside_the_weights(plan: Plan) -> None:
    gpu = Gpu("given", 16 * GIB)
    (stage,) = capacity(plan, gpu=gpu, kv_pool_bytes=2 * GIB).stages
    assert stage.weights_bytes + 2 * GIB < 16 * GIB
    with refusal(CapacityError, "a KV pool of 4.0 GiB beside", "the 16.0 GiB of given", "give a pool below"):
        capacity(plan, gpu=gpu, kv_pool_bytes=4 * GIB)
    with refusal(CapacityError, "use more ranks or larger GPUs"):
        capacity(plan, gpu=gpu, kv_pool_bytes=0, weights_per_gpu_bytes=17 * GIB)


def test_a_request_that_does_not_fit_alone_is_refused(plan: Plan) -> None:
    with refusal(CapacityError, "decode: 1 request of 1,048,576 tokens"):
        capacity(plan, gpu=gpu_named("h100"), context=1_048_576)


def test_prefill_needs_room_for_one_request_only() -> None:
    # Its FP8 weights are cut in whole blocks: two heads a rank are 384 rows.
    plan = plan_of(tiny("glm-5.2-fp8", num_attention_heads=16, num_key_value_heads=16), "glm-5.2-int4",
                   tensor_parallel=2)  # fmt: skip
    stages = capacity(plan, stage="both", kv_pool_bytes=10_000 * 1080, context=4096, requests=2).stages
    assert [(stage.stage.name, stage.stage.recipe) for stage in stages] == [
        ("decode", "glm-5.2-int4"),
        ("prefill", "copy"),
    ]
    assert stages[1].stage.weight_formats == ("fp8-block 128x128", "BF16")
    assert stages[1].token.format is CacheFormat.BF16
    assert stages[0].requests is not None
    assert stages[0].requests >= 2
    assert stages[1].requests == 2


def test_a_prefill_stage_that_cannot_be_cut_names_itself() -> None:
    plan = plan_of(tiny("glm-5.2-fp8"), "glm-5.2-int4", tensor_parallel=2)
    with refusal(AlignmentError, "prefill stage, recipe copy", "q_b_proj", "FP8 blocks", "--stage"):
        capacity(plan, stage="both")
    as_bf16 = capacity(plan, stage="both", prefill_recipe="dequantize").stages[1]
    assert as_bf16.stage.weight_formats == ("BF16",)
    with refusal(RecipeError, "glm-4.7-int4", "glm_moe_dsa"):
        capacity(plan, stage="prefill", prefill_recipe="glm-4.7-int4")
    with refusal(UsageError, "a prefill recipe, but only decode is planned", "--stage prefill or both"):
        capacity(plan, prefill_recipe="copy")


def test_a_kv_format_of_a_stage_that_is_not_planned_is_refused() -> None:
    plan = plan_of(tiny("glm-5.2-fp8"), "glm-5.2-int4")
    with refusal(UsageError, "a KV format of prefill, but only decode is planned", "--stage prefill or both"):
        capacity(plan, prefill_kv_format=CacheFormat.FP8_DS_MLA)
    # Without INT4 a plan is of the prefill stage unless it is asked for another.
    as_it_is = plan_of(tiny("glm-5.2-fp8"), "copy")
    with refusal(UsageError, "a KV format of decode, but only prefill is planned", "--stage decode or both"):
        capacity(as_it_is, kv_format=CacheFormat.FP8_E4M3)
    forms = {"kv_format": CacheFormat.FP8_E4M3, "prefill_kv_format": CacheFormat.FP8_DS_MLA}
    assert [s.token.format for s in capacity(as_it_is, stage="both", **forms).stages] == [*forms.values()]


def test_a_plan_without_int4_is_of_the_prefill_stage() -> None:
    (stage,) = capacity(plan_of(tiny("glm-5.2-fp8"), "dequantize")).stages
    assert (stage.stage.name, stage.stage.recipe) == ("prefill", "dequantize")
    decode, prefill = capacity(plan_of(tiny("glm-5.2-fp8"), "dequantize"), stage="both").stages
    assert decode.stage.weight_formats == prefill.stage.weight_formats == ("BF16",)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"context": 0}, "context 0"),
        ({"context": -5}, "context -5"),
        ({"context": 10, "requests": 0}, "requests 0"),
        ({"context": 10, "requests": 2**50}, "requests"),
        ({"requests": 5}, "--context"),
        ({"kv_pool_bytes": -1}, "KV pool of -1 bytes"),
        ({"weights_per_gpu_bytes": 2**60}, "weights a GPU of 1.15"),
        ({"overhead_seconds": float("nan")}, "overhead of nan s"),
        ({"share": 1.0}, "a saving of 1 of a step"),
        ({"memory_fraction": 1.5}, "memory fraction 1.5"),
        ({"gpu": Gpu("given", 0)}, "GPU memory of 0 bytes"),
        ({"gpu": Gpu("given", 141)}, "as 141GiB"),
        ({"gpu": Gpu("given", 80 * GIB, 4)}, "GPU bandwidth of 4 bytes a second"),
        ({"gpu": Gpu("given", 80 * GIB, float("inf"))}, "GPU bandwidth of inf"),
        ({"gpu": Gpu("given", 80 * GIB, 1e12, float("nan"))}, "GPU BF16 rate of nan FLOP/s"),
        # So slow that a step would take infinitely long, which JSON cannot say.
        ({"gpu": Gpu("given", 80 * GIB, 1e12, 1e12, 5e-324)}, "GPU FP8 rate of 4.94066e-324"),
    ],
)
def test_what_makes_no_sense_is_refused(request_: dict[str, Any], words: str) -> None:
    with refusal(UsageError, words):
        CapacityRequest(**request_)


def test_a_reserve_below_zero_is_refused() -> None:
    with refusal(UsageError, "reserve for graphs", "-1"):
        ReserveChoice(graphs=-1)
