"""Bytes of one rank: the sum of what the cut says tensor by tensor, and the rank files that are really written."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_checkpoints import NAMES, TINY_GLM5
from tiny_plans import plan_of, tiny

import memopt
from memopt.compressor.capacity.capacity_plan import plan_weights, planned_layout
from memopt.compressor.families.roles import Role
from memopt.compressor.plan import PlanOptions
from memopt.compressor.ranks.cut import cut_of, rank_size_bytes
from memopt.compressor.recipe import DEFAULT_RECIPES
from memopt.errors import AlignmentError
from memopt.manifests.safetensors_header import read_header

DEGREES = (1, 2, 4)


def data_size_bytes(folder: Path) -> int:
    """Bytes of tensor data in every weight file of a folder, from their headers."""
    total = 0
    for path in folder.glob("*.safetensors"):
        total += sum(tensor.end - tensor.start for tensor in read_header(path).tensors)
    return total


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["tensor_parallel", "expert_parallel"])
@pytest.mark.parametrize("degree", DEGREES)
def test_every_rank_holds_what_is_planned(name: str, kind: str, degree: int) -> None:
    checkpoint = tiny(name)
    plan = plan_of(checkpoint, DEFAULT_RECIPES[checkpoint.config.model_type], **{kind: degree})
    weights, layout = plan_weights(plan), planned_layout(plan)
    assert layout.folder == f"{'tp' if kind == 'tensor_parallel' else 'ep'}{degree}"
    for rank in range(degree):
        cuts = [(output, cut_of(output, tensor, layout)) for tensor in plan.tensors for output in tensor.outputs]
        assert sum(rank_size_bytes(output, cut, rank) for output, cut in cuts) == weights.size_bytes(is_mtp_on=True)
    assert weights.checkpoint_size_bytes(is_mtp_on=True) == plan.weights_size_bytes
    # Replicated tensors are on every rank: all of them together hold the checkpoint, and more.
    surplus = degree * weights.size_bytes(is_mtp_on=True) - plan.weights_size_bytes
    assert (surplus > 0) == (degree > 1)


def test_mtp_layers_are_counted_apart() -> None:
    weights = plan_weights(plan_of(tiny("glm-5.2-fp8"), "glm-5.2-int4", tensor_parallel=4))
    assert weights.size_bytes(is_mtp_on=False) < weights.size_bytes(is_mtp_on=True)
    assert weights.absorbed_size_bytes(is_mtp_on=True) * 3 == weights.absorbed_size_bytes(is_mtp_on=False) * 4
    # Three layers of 8/4 heads, 32 + 32 rows, a latent of 128, two bytes each.
    assert weights.absorbed_bytes == 3 * 2 * 64 * 128 * 2
    without = plan_weights(plan_of(tiny("kimi-k2-instruct-fp8"), "kimi-k2-int4", tensor_parallel=4))
    assert without.size_bytes(is_mtp_on=False) == without.size_bytes(is_mtp_on=True)


def test_grouped_attention_keeps_no_copies() -> None:
    assert plan_weights(plan_of(tiny("glm-4.7-fp8"), "glm-4.7-int4")).absorbed_size_bytes(is_mtp_on=True) == 0


def test_elements_of_a_rank_are_the_models() -> None:
    whole = plan_weights(plan_of(tiny("glm-5.2-fp8"), "glm-5.2-int4", tensor_parallel=1))
    # Three MoE layers (one of them MTP) of four experts, three matrices of 256 x 256.
    experts = [row.rank_elements for row in whole.rows if row.role is Role.ROUTED_EXPERT]
    assert sum(experts) == 3 * 4 * 3 * 256 * 256
    for kind in ("tensor_parallel", "expert_parallel"):
        half = plan_weights(plan_of(tiny("glm-5.2-fp8"), "glm-5.2-int4", **{kind: 2}))
        assert sum(row.rank_elements for row in half.rows if row.role is Role.ROUTED_EXPERT) * 2 == sum(experts)
        assert [r.rank_elements for r in half.rows if r.role is Role.ROUTER] == [
            r.rank_elements for r in whole.rows if r.role is Role.ROUTER
        ]


def test_fp8_weights_are_told_from_the_others() -> None:
    rows = plan_weights(plan_of(tiny("glm-5.2-fp8"), "copy")).rows
    assert {row.is_float8 for row in rows if row.role is Role.ROUTED_EXPERT} == {True}
    assert {row.is_float8 for row in rows if row.role in {Role.ROUTER, Role.LM_HEAD, Role.NORM}} == {False}


def test_a_degree_that_does_not_divide_is_refused_by_the_plan() -> None:
    with pytest.raises(AlignmentError):
        plan_of(tiny("glm-5.2-fp8"), "glm-5.2-int4", tensor_parallel=3)


@pytest.mark.parametrize(("kind", "degree"), [("tp", 2), ("tp", 8), ("ep", 4)])
def test_the_rank_files_that_are_written_hold_the_planned_bytes(kind: str, degree: int, tmp_path: Path) -> None:
    degrees = {"tensor_parallel" if kind == "tp" else "expert_parallel": degree}
    options = PlanOptions(layout="tp", **degrees)  # type: ignore[arg-type]
    weights = plan_weights(memopt.plan(TINY_GLM5, options=options))
    memopt.compress(TINY_GLM5, tmp_path / "out", options=options, device="cpu")
    ranks = sorted((tmp_path / "out" / f"{kind}{degree}").iterdir())
    assert len(ranks) == degree
    assert {data_size_bytes(rank) for rank in ranks} == {weights.size_bytes(is_mtp_on=True)}
