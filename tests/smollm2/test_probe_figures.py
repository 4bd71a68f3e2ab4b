"""Paired changes, regression targets and group sizes by sensitivity."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.smollm2.probes.error_feedback import regression, residual_target, target_weight
from benchmarks.smollm2.probes.group_sizes import GROUP_SIZES, LayerErrors, LayerGroups, choose_groups
from benchmarks.smollm2.probes.paired_change import paired_change
from benchmarks.smollm2.probes.probe import PROBES, bits_per_weight
from benchmarks.smollm2.probes.window_kl import WindowScores
from memopt.errors import ShapeError, UsageError

TOKENS = (100, 200, 50, 100)
KL_SUMS = (1.0, 9.0, 0.5, 30.0)


def scores(kl_sums: tuple[float, ...], tokens: tuple[int, ...] = TOKENS) -> WindowScores:
    return WindowScores(tokens, kl_sums, tuple(count // 2 for count in tokens))


def test_what_windows_have_in_common_cancels() -> None:
    change = paired_change(scores(tuple(1.1 * kl for kl in KL_SUMS)), scores(KL_SUMS))
    assert change.value == pytest.approx(0.1)
    # Windows differ thirtyfold, their ratios do not.
    assert change.low == pytest.approx(0.1)
    assert change.high == pytest.approx(0.1)


def test_a_change_in_one_window_is_not_certain() -> None:
    change = paired_change(scores((1.0, 9.0, 0.5, 20.0)), scores(KL_SUMS))
    assert change.value == pytest.approx(-10 / 40.5)
    assert change.low < change.value < change.high
    # Without that window nothing changes.
    assert change.high == 0


def test_a_probe_beside_itself_changes_nothing() -> None:
    change = paired_change(scores(KL_SUMS), scores(KL_SUMS))
    assert (change.value, change.low, change.high) == (0, 0, 0)


def test_scores_of_other_windows_are_refused() -> None:
    with pytest.raises(ShapeError, match="4 windows of 450 predictions beside 3 of 350"):
        paired_change(scores(KL_SUMS), scores(KL_SUMS[:3], TOKENS[:3]))


def inputs(num_rows: int, num_columns: int, seed: int) -> torch.Tensor:
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed))


def test_targets_undo_what_happened_to_the_inputs() -> None:
    rows, weight = inputs(400, 8, 0), inputs(5, 8, 1)
    bent = torch.eye(8) + 0.1 * inputs(8, 8, 2)
    hessian = rows.T @ rows / 400
    moved = target_weight(weight, rows @ bent, rows, hessian, share=1.0, ridge=0.0)
    assert torch.allclose(rows @ moved.T, (rows @ bent) @ weight.T, atol=1e-4)
    half = target_weight(weight, rows @ bent, rows, hessian, share=0.5, ridge=0.0)
    assert torch.allclose(half, (weight + moved) / 2, atol=1e-5)
    # A ridge pulls to the weight itself, not to zero.
    stiff = target_weight(weight, rows @ bent, rows, hessian, share=1.0, ridge=1e6)
    assert torch.allclose(stiff, weight, atol=1e-4)


def test_equal_streams_leave_the_weight_as_it_is() -> None:
    rows, weight = inputs(50, 8, 0), inputs(5, 8, 1)
    assert torch.equal(target_weight(weight, rows, rows, rows.T @ rows / 50, 1.0, 0.01), weight)


def test_a_residual_that_the_rows_explain_is_added() -> None:
    rows, change = inputs(400, 8, 0), inputs(5, 8, 1)
    hessian = rows.T @ rows / 400
    assert torch.allclose(residual_target(rows @ change.T, rows, hessian, 1.0, 0.0), change, atol=1e-4)
    assert torch.allclose(residual_target(rows @ change.T, rows, hessian, 0.25, 0.0), change / 4, atol=1e-4)


def test_a_column_without_tokens_gets_nothing() -> None:
    rows = inputs(400, 8, 0)
    rows[:, 3] = 0
    found = regression(inputs(5, 8, 1) * (rows != 0).any(0), rows.T @ rows / 400, 0.01)
    assert bool(torch.isfinite(found).all())
    assert not bool(found[:, 3].any())


def errors_by_size(of_32: list[LayerErrors]) -> dict[int, list[LayerErrors]]:
    """Errors that grow with the group, as they do."""
    return {
        size: [LayerErrors(layer.gate_up * size / 32, layer.down * size / 32) for layer in of_32]
        for size in GROUP_SIZES
    }


def mean_bits(groups: tuple[LayerGroups, ...]) -> float:
    return sum(layer.bits_per_weight for layer in groups) / len(groups)


positive = st.floats(1e-6, 1.0)


@given(
    st.lists(st.builds(LayerErrors, gate_up=positive, down=positive), min_size=1, max_size=9),
    st.floats(bits_per_weight(128), 5.0),
)
def test_bytes_hold_and_more_of_them_never_hurt(layers: list[LayerErrors], bits: float) -> None:
    errors = errors_by_size(layers)
    chosen = choose_groups(errors, bits)
    assert len(chosen) == len(layers)
    assert mean_bits(chosen) <= bits + 1e-6
    assert choose_groups(errors, bits_per_weight(32)) == (LayerGroups(32, 32),) * len(layers)
    assert choose_groups(errors, bits_per_weight(128)) == (LayerGroups(128, 128),) * len(layers)


def test_scales_go_where_they_save_most() -> None:
    quiet, loud = LayerErrors(1e-5, 1e-5), LayerErrors(1e-5, 1e-2)
    chosen = choose_groups(errors_by_size([quiet, loud, quiet]), 4.25)
    assert chosen[1].down == 32
    assert mean_bits(chosen) <= 4.25


def test_fewer_bits_than_the_largest_groups_need_are_refused() -> None:
    with pytest.raises(UsageError, match=r"4 bits a weight are asked for, groups of 128 take 4\.125"):
        choose_groups(errors_by_size([LayerErrors(1, 1)]), 4.0)


def test_probes_have_names_of_their_own() -> None:
    names = [probe.name for probe in PROBES]
    assert len(set(names)) == len(names)
    assert len(set(PROBES)) == len(PROBES)
