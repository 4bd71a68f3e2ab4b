"""Calibrated rounding of a stack: the textbook's codes, true figures, and never worse than plain rounding."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest
import torch
from calibration_problems import make_offsets, make_tokens
from gptq_textbook import textbook_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memopt.compressor.calibrate.calibrated_rounding import CalibratedRows, round_calibrated
from memopt.compressor.calibrate.expert_rounding import RoundingOptions, column_importance
from memopt.compressor.calibrate.module_statistics import ModuleStatistics, StatisticsCollector
from memopt.compressor.calibrate.rounding_report import ExpertReport, fallback_share
from memopt.compressor.fallback_reason import FallbackReason
from memopt.compressor.recipe import Int4Format
from memopt.errors import AlignmentError, NonFiniteError, ShapeError, UsageError
from memopt.kernels import cpu, int4_reference
from memopt.kernels.calibration.gptq_reference import gptq_reference
from memopt.kernels.int4_spec import Int4Spec
from memopt.kernels.number_reference import bf16_value

GPTQ = Int4Format(type="int4", method="gptq", group_size=32)
WEIGHTED = Int4Format(type="int4", method="weighted", group_size=32)
NO_SWEEPS = RoundingOptions(num_sweeps=0)


def _weights(num_experts: int, num_rows: int, size: int, seed: int = 0) -> Tensor:
    """Float32 weights that BF16 holds."""
    plain = torch.randn(num_experts, num_rows, size, generator=torch.Generator().manual_seed(seed)) * 0.02
    return plain.to(torch.bfloat16).to(torch.float32)


def _statistics(counts: tuple[int, ...], size: int, seed: int = 0) -> ModuleStatistics:
    collector = StatisticsCollector(len(counts), size, with_hessian=True)
    collector.add(make_tokens(sum(counts), size, seed), make_offsets(*counts))
    return collector.finish()


def _of_tokens(tokens: Tensor) -> ModuleStatistics:
    collector = StatisticsCollector(1, tokens.shape[1], with_hessian=True)
    collector.add(tokens)
    return collector.finish()


def _codes(rows: CalibratedRows, expert: int) -> Tensor:
    return int4_reference.unpack_int4(rows.packed[expert])


def _values(rows: CalibratedRows, expert: int) -> Tensor:
    """float64 [R, K] that the rows stand for."""
    codes, scale = _codes(rows, expert).double(), bf16_value(rows.scale_bits[expert]).double()
    return codes * scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)


def _error(weight: Tensor, values: Tensor, hessian: Tensor) -> float:
    difference = weight.double() - values
    return float(((difference @ hessian.double()) * difference).sum())


def _plain_values(weight: Tensor, group_size: int | None = 32) -> Tensor:
    rows = int4_reference.quantize_int4(weight.to(torch.bfloat16), None, None, Int4Spec(group_size))
    return int4_reference.dequantize_int4(rows.packed, rows.scale_bits, group_size).double()


def _hessian(statistics: ModuleStatistics, expert: int) -> Tensor:
    assert statistics.hessian is not None
    return statistics.hessian[expert]


@pytest.mark.parametrize("counts", [(300, 64), (40, 1)])
def test_the_solve_gives_the_codes_of_the_textbook(counts: tuple[int, ...]) -> None:
    weight, statistics = _weights(2, 40, 128), _statistics(counts, 128)
    rows = round_calibrated(weight, statistics, GPTQ, NO_SWEEPS)
    for expert, report in enumerate(rows.reports):
        scale = bf16_value(rows.scale_bits[expert])
        expected = gptq_reference(weight[expert], _hessian(statistics, expert), scale, act_order=True)
        is_same = (expected == _codes(rows, expert)).all(dim=1)
        assert int((~is_same).sum()) == report.num_plain_rows
        assert (report.method, report.damping, report.fallback) == ("gptq", 0.01, None)


def test_figures_are_true_and_each_method_gains_on_the_one_before() -> None:
    weight, statistics = _weights(2, 64, 256, seed=1), _statistics((500, 300), 256, seed=1)
    rows = round_calibrated(weight, statistics, GPTQ)
    solved = round_calibrated(weight, statistics, GPTQ, NO_SWEEPS)
    for expert, report in enumerate(rows.reports):
        hessian = _hessian(statistics, expert)
        true = _error(weight[expert], _values(rows, expert), hessian)
        plain = _error(weight[expert], _plain_values(weight[expert]), hessian)
        assert report.error == pytest.approx(true, rel=1e-4)
        assert report.plain_error == pytest.approx(plain, rel=5e-3)  # dequantized to BF16 there
        assert report.energy == pytest.approx(_error(weight[expert], torch.zeros(1).double(), hessian), rel=1e-5)
        assert report.weighted_error is not None
        assert report.error < 0.97 * solved.reports[expert].error
        assert solved.reports[expert].error < 0.5 * report.weighted_error < 0.5 * report.plain_error
        assert (report.num_tokens, report.num_rows, report.num_dead_columns) == ((500, 300)[expert], 64, 0)


def test_weighted_rows_are_those_of_the_rounding_kernel() -> None:
    weight, statistics = _weights(1, 48, 256, seed=2), _statistics((400,), 256, seed=2)
    rows = round_calibrated(weight, dataclasses.replace(statistics, hessian=None), WEIGHTED)
    importance = column_importance(statistics.second_moment, 0.01)[0]
    bits = weight[0].to(torch.bfloat16).view(torch.int16).numpy().view("uint16")
    expected = cpu.quantize_int4(bits, None, None, Int4Spec(32), importance.numpy())
    is_same = (rows.packed[0] == torch.from_numpy(expected.packed)).all(dim=1)
    (report,) = rows.reports
    assert int((~is_same).sum()) == report.num_plain_rows
    diagonal = torch.diag(statistics.second_moment[0])
    assert report.error == pytest.approx(_error(weight[0], _values(rows, 0), diagonal), rel=1e-4)
    assert report.error < 0.85 * report.plain_error
    assert (report.method, report.damping) == ("weighted", None)
    # Hessians that happen to be there change nothing.
    assert torch.equal(round_calibrated(weight, statistics, WEIGHTED).packed, rows.packed)


@pytest.mark.parametrize("form", [GPTQ, WEIGHTED], ids=["gptq", "weighted"])
def test_gate_and_up_that_share_a_hessian_are_what_they_are_apart(form: Int4Format) -> None:
    weight, statistics = _weights(2, 48, 128, seed=3), _statistics((200, 90), 128, seed=3)
    tied = round_calibrated(weight, statistics, form)
    for rows in (slice(0, 24), slice(24, 48)):
        untied = round_calibrated(weight[:, rows].contiguous(), statistics, form)
        assert torch.equal(tied.packed[:, rows], untied.packed)
        assert torch.equal(tied.scale_bits[:, rows], untied.scale_bits)


def test_bytes_depend_neither_on_other_experts_nor_on_threads() -> None:
    weight, statistics = _weights(3, 40, 320, seed=4), _statistics((100, 0, 500), 320, seed=4)
    whole = round_calibrated(weight, statistics, GPTQ)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        again = round_calibrated(weight, statistics, GPTQ, num_workers=2)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
    assert torch.equal(whole.packed, again.packed)
    assert torch.equal(whole.scale_bits, again.scale_bits)
    assert whole.reports == again.reports
    for expert in range(3):
        one = slice(expert, expert + 1)
        alone = round_calibrated(weight[one], statistics.of_expert(expert), GPTQ)
        assert torch.equal(alone.packed, whole.packed[one])
        assert torch.equal(alone.scale_bits, whole.scale_bits[one])
        assert dataclasses.replace(alone.reports[0], expert=expert) == whole.reports[expert]


def test_groups_in_another_order_give_their_codes_in_that_order() -> None:
    weight, statistics = _weights(1, 60, 128, seed=5), _statistics((300,), 128, seed=5)
    order = torch.arange(128).view(4, 32)[[2, 0, 3, 1]].flatten()
    hessian = _hessian(statistics, 0)[order][:, order][None].contiguous()
    moved = dataclasses.replace(
        statistics, second_moment=statistics.second_moment[:, order].contiguous(), hessian=hessian
    )
    first = round_calibrated(weight, statistics, GPTQ, NO_SWEEPS)
    second = round_calibrated(weight[:, :, order].contiguous(), moved, GPTQ, NO_SWEEPS)
    assert torch.equal(_codes(first, 0)[:, order], _codes(second, 0))
    assert second.reports[0].error == pytest.approx(first.reports[0].error, rel=1e-5)


@settings(max_examples=30, deadline=None)
@given(
    num_tokens=st.sampled_from([0, 1, 2, 20, 200]),
    size=st.sampled_from([32, 64]),
    seed=st.integers(0, 1000),
    dead=st.sets(st.integers(0, 31)),
    twins=st.booleans(),
    spread=st.sampled_from([0.0, 3.0, 9.0]),
    is_gptq=st.booleans(),
    num_sweeps=st.integers(0, 2),
)
def test_no_expert_is_worse_than_plain_rounding(
    num_tokens: int, size: int, seed: int, dead: set[int], twins: bool, spread: float, is_gptq: bool, num_sweeps: int
) -> None:
    tokens = make_tokens(num_tokens, size, seed).float()
    tokens *= (spread * torch.randn(size, generator=torch.Generator().manual_seed(seed))).exp()
    if twins:
        tokens[:, 1] = tokens[:, 0]
    tokens[:, list(dead)] = 0
    statistics, weight = _of_tokens(tokens.to(torch.bfloat16)), _weights(1, 7, size, seed)
    form, options = GPTQ if is_gptq else WEIGHTED, RoundingOptions(num_sweeps=num_sweeps)
    rows = round_calibrated(weight, statistics, form, options)
    (report,) = rows.reports
    assert bool((rows.scale_bits & 0x7FFF != 0).all())
    assert report.error <= report.plain_error
    assert report.num_tokens == num_tokens
    hessian = _hessian(statistics, 0) if is_gptq else torch.diag(statistics.second_moment[0])
    true = _error(weight[0], _values(rows, 0), hessian)
    # A product in float32 of terms that cancel: few tokens leave differences whose outputs are nearly zero.
    terms = float((weight[0].double() - _values(rows, 0)).square().sum() * hessian.double().trace())
    assert report.error == pytest.approx(true, rel=1e-3, abs=1e-6 * terms)
    nearest = torch.round(weight[0] / bf16_value(rows.scale_bits[0]).repeat_interleave(32, 1)).clamp(-8, 7)
    for column in dead:
        assert torch.equal(_codes(rows, 0)[:, column].float(), nearest[:, column])
    if num_tokens == 0:
        assert (report.fallback, report.method, report.error) == (FallbackReason.FEW_TOKENS, "plain", 0.0)


def test_experts_that_fall_back_say_why_and_are_counted() -> None:
    weight, statistics = _weights(4, 16, 64, seed=6), _statistics((90, 10, 50, 60), 64, seed=6)
    assert statistics.hessian is not None
    statistics.second_moment[2] = 0.0
    statistics.hessian[2] = 0.0
    statistics.hessian[3] = -100 * torch.eye(64)
    rows = round_calibrated(weight, statistics, GPTQ, RoundingOptions(min_tokens=20))
    assert [report.fallback for report in rows.reports] == [
        None, FallbackReason.FEW_TOKENS, FallbackReason.NO_SIGNAL, FallbackReason.SINGULAR,
    ]  # fmt: skip
    assert [report.method for report in rows.reports[:3]] == ["gptq", "plain", "plain"]
    assert rows.reports[3].method in ("weighted", "plain")
    assert fallback_share(rows.reports) == 0.75
    assert fallback_share([]) == 0.0
    plain = int4_reference.quantize_int4(weight[1].to(torch.bfloat16), None, None, Int4Spec(32))
    assert torch.equal(rows.packed[1], plain.packed)
    assert torch.equal(rows.scale_bits[1], plain.scale_bits)


def test_a_solve_that_loses_keeps_the_plain_codes_and_is_counted() -> None:
    # So much damping that the solve answers another question: with one row, plain rounding is sometimes better.
    form = Int4Format(type="int4", method="gptq", group_size="channel", damping=1.0)
    reports: list[ExpertReport] = []
    for seed in range(40):
        weight = _weights(1, 1, 8, seed)
        rows = round_calibrated(weight, _statistics((9,), 8, seed), form, NO_SWEEPS)
        plain = int4_reference.quantize_int4(weight[0].to(torch.bfloat16), None, None, Int4Spec(None))
        (report,) = rows.reports
        reports.append(report)
        if report.fallback is not None:
            assert torch.equal(rows.packed[0], plain.packed)
            assert torch.equal(rows.scale_bits[0], plain.scale_bits)
            assert report.error == report.plain_error
    lost = [report for report in reports if report.fallback is FallbackReason.NO_GAIN]
    assert 0 < len(lost) < 20
    assert all(report.method == "plain" and report.num_plain_rows == 1 for report in lost)


def test_shrinkage_helps_an_expert_with_few_tokens() -> None:
    weight = _weights(1, 64, 128, seed=7)
    tokens = make_tokens(6024, 128, seed=8)
    layer, own, truth = (_of_tokens(part) for part in tokens.split([2000, 24, 4000]))
    held_out = _hessian(truth, 0)
    errors = []
    for shrinkage_tokens in (0.0, 64.0):
        options = RoundingOptions(shrinkage_tokens=shrinkage_tokens)
        rows = round_calibrated(weight, own, GPTQ, options, layer=layer)
        errors.append(_error(weight[0], _values(rows, 0), held_out))
    assert errors[1] < 0.8 * errors[0]


@pytest.mark.parametrize("method", ["gptq", "weighted"])
def test_the_damping_is_that_of_the_recipe(method: Literal["gptq", "weighted"]) -> None:
    weight, statistics = _weights(1, 48, 64, seed=9), _statistics((40,), 64, seed=9)
    form = Int4Format(type="int4", method=method, damping=0.5)
    rows = round_calibrated(weight, statistics, form)
    wanted, usual = (
        textbook_rows(weight[0], _hessian(statistics, 0).double(), method, 32, damping) for damping in (0.5, 0.01)
    )
    assert torch.equal(_codes(rows, 0), wanted.codes)
    assert torch.equal(bf16_value(rows.scale_bits[0]), wanted.scale)
    assert not torch.equal(wanted.codes, usual.codes)
    assert rows.reports[0].damping == (0.5 if method == "gptq" else None)


def test_importance_of_columns() -> None:
    moments = torch.tensor([[4.0, 0.0, 2.0]])
    found = column_importance(moments, 0.5)
    # Live mean 3, half of it is added; the dead column counts the mean.
    torch.testing.assert_close(found, torch.tensor([[5.5, 4.5, 3.5]]) / 5.5)
    for bad in (torch.zeros(1, 3), torch.tensor([[1.0, -1.0, 1.0]])):
        with pytest.raises(UsageError, match="second moments"):
            column_importance(bad, 0.01)


def test_refusals() -> None:
    weight, statistics = _weights(1, 4, 64), _statistics((50,), 64)
    with pytest.raises(UsageError, match="rtn"):
        round_calibrated(weight, statistics, Int4Format(type="int4"))
    with pytest.raises(UsageError, match="Hessians"):
        round_calibrated(weight, dataclasses.replace(statistics, hessian=None), GPTQ)
    with pytest.raises(ShapeError, match="1 experts with 64 columns"):
        round_calibrated(_weights(2, 4, 64), statistics, GPTQ)
    with pytest.raises(ShapeError, match="float32"):
        round_calibrated(weight.double(), statistics, GPTQ)
    with pytest.raises(ShapeError, match="no experts"):
        round_calibrated(weight[:0], statistics, GPTQ)
    with pytest.raises(UsageError, match="num_workers"):
        round_calibrated(weight, statistics, GPTQ, num_workers=0)
    with pytest.raises(AlignmentError, match="64 weights"):
        round_calibrated(weight, statistics, GPTQ.model_copy(update={"group_size": 128}))
    weight[0, 1, 2] = torch.nan
    with pytest.raises(NonFiniteError, match="row 1, column 2"):
        round_calibrated(weight, statistics, GPTQ)
