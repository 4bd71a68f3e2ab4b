"""Time and memory before a run: of the right order, and ordered as the work is."""

from __future__ import annotations

import pytest
from tiny_plans import plan_of, recipe, tiny

from memopt.compressor.estimate import estimate
from memopt.compressor.plan import Plan

BIG = {"n_routed_experts": 64, "hidden_size": 1024, "moe_intermediate_size": 512}


def experts(scale: str) -> Plan:
    rule = {"roles": ["routed_expert"], "format": {"type": "int4", "scale": scale}}
    return plan_of(tiny("glm-5.2-fp8", **BIG), recipe(rule))


@pytest.mark.parametrize(
    ("scale", "seconds"),
    # 301,989,888 expert weights at 440, 220 and 190 million a second, and 15,873,500 other bytes at 800 million.
    [("absmax", 0.7061), ("mse", 1.3924), ("mse-signed", 1.6092)],
)
def test_golden_times_and_memory(scale: str, seconds: float) -> None:
    plan = experts(scale)
    weights = sum(t.source.weight.size_bytes for t in plan.tensors if t.int4 is not None)
    assert weights == 3 * 64 * 3 * 1024 * 512 == 301_989_888
    guess = estimate(plan, 1)
    assert guess.seconds == pytest.approx(seconds, abs=1e-4)
    # 300 MiB, 5,000 bytes for each of 652 tensors, eight chunks of 2 MiB, and one expert's scales.
    assert guess.host_memory_bytes == 334642928


def test_golden_time_of_a_copy() -> None:
    guess = estimate(plan_of(tiny("glm-5.2-fp8", **BIG), "copy"), 1)
    assert guess.seconds == pytest.approx(317_863_388 / 800e6)
    assert guess.host_memory_bytes == 334_610_272


def test_rank_files_take_time_of_their_own() -> None:
    """Every rank's bytes, replicated ones each time, at 900 million a second and core."""
    hub, both = (
        plan_of(tiny("glm-5.2-fp8", **BIG), "copy", tensor_parallel=1, layout=layout) for layout in ("hub", "both")
    )
    rank_bytes = sum(file.data_size_bytes for unit in both.units for file in unit.rank_files)
    assert rank_bytes == both.weights_size_bytes
    for workers in (1, 4):
        extra = estimate(both, workers).seconds - estimate(hub, workers).seconds
        assert extra == pytest.approx(rank_bytes / 900e6 / workers)


def test_more_workers_take_less_time_and_more_memory() -> None:
    plan = experts("mse-signed")
    one, four = estimate(plan, 1), estimate(plan, 4)
    assert four.seconds == pytest.approx(one.seconds / 4)
    assert four.host_memory_bytes > one.host_memory_bytes
    assert (one.workers, four.workers) == (1, 4)
    assert estimate(plan, 0).seconds == one.seconds


def test_a_search_takes_longer_than_rounding_and_copying() -> None:
    copied = estimate(plan_of(tiny("glm-5.2-fp8", **BIG), "copy"), 1).seconds
    times = [copied, *(estimate(experts(scale), 1).seconds for scale in ("absmax", "mse", "mse-signed"))]
    assert times == sorted(times)
    assert copied > 0


def test_memory_does_not_grow_with_the_size_of_experts() -> None:
    small = estimate(plan_of(tiny("glm-4.7-fp8"), "glm-4.7-int4"), 2).host_memory_bytes
    wide = estimate(plan_of(tiny("glm-4.7-fp8", moe_intermediate_size=4096), "glm-4.7-int4"), 2).host_memory_bytes
    assert small < wide < small + 2**21
    assert wide < 1.5 * 2**30
