"""The share of weights that may end with a lesser method: what is allowed, what stops a release, and what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from calibrated_runs import experts, recipe
from tiny_checkpoints import make_checkpoint

import memopt
from memopt.compressor.calibration_budget import require_fallback_budget
from memopt.compressor.calibration_figures import CalibrationFigures
from memopt.compressor.fallback_reason import FallbackReason
from memopt.compressor.tensor_plan import TensorPlan
from memopt.errors import ContentError, QualityGateError

# Routed experts of one MoE layer, three weights each; 0.29 * 300 is less than 87 in float64.
NUM_EXPERTS, NUM_FALLEN = 100, 87


def figures(reason: str) -> CalibrationFigures:
    return CalibrationFigures(9, 0, "plain" if reason else "gptq", 0.01, 4.0, 2.0, 1.0, 8, 0, reason)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("source") / "checkpoint", "glm-5.1-fp8", hidden_size=64, moe_intermediate_size=32,
        num_hidden_layers=2, n_routed_experts=NUM_EXPERTS, num_nextn_predict_layers=0,
    )  # fmt: skip


def planned(source: Path, max_fallback: float | str) -> list[TensorPlan]:
    return list(memopt.plan(source, recipe([experts("gptq", max_fallback=max_fallback)])).tensors)


@pytest.mark.parametrize("share", [0.29, "29%"])
def test_a_share_is_met_by_exactly_so_many(source: Path, share: float | str) -> None:
    assert NUM_FALLEN > 0.29 * 3 * NUM_EXPERTS
    tensors = planned(source, share)
    names = [plan.source.spec.name for plan in tensors if plan.int4 is not None]
    assert len(names) == 3 * NUM_EXPERTS
    fallen = set(names[:NUM_FALLEN])
    found = {name: figures(FallbackReason.FEW_TOKENS if name in fallen else "") for name in names}
    require_fallback_budget(tensors, found)
    found[names[NUM_FALLEN]] = figures(FallbackReason.SINGULAR)
    with pytest.raises(QualityGateError, match=r"88 of 300 .* max_fallback allows 29.00%: .* and 85 more") as refused:
        require_fallback_budget(tensors, found)
    assert refused.value.exit_code == 5
    assert f"{names[0]} (too few tokens)" in str(refused.value)


def test_the_ledger_has_the_reason_as_a_number() -> None:
    numbers = [figures(reason).ledger_figures()["fallback"] for reason in ("", *FallbackReason)]
    assert numbers == [0, 1, 2, 3, 4]
    # Ledgers that are written have them in this order.
    assert [reason.name for reason in FallbackReason] == ["FEW_TOKENS", "NO_SIGNAL", "SINGULAR", "NO_GAIN"]


def test_a_weight_without_figures_is_named(source: Path) -> None:
    tensors = planned(source, 1.0)
    names = [plan.source.spec.name for plan in tensors if plan.int4 is not None]
    with pytest.raises(ContentError, match="has no codes") as found:
        require_fallback_budget(tensors, {name: figures("") for name in names if name != names[7]})
    assert found.value.tensor == names[7]
