"""Refining codes and scales: the float64 oracle's codes, no row worse than before, and odd Hessians."""

from __future__ import annotations

import pytest
import torch
from calibration_problems import Problem, losses, make_problem, plain_codes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memopt.errors import AlignmentError, ShapeError, UsageError
from memopt.kernels.calibration.gptq import gptq_solve
from memopt.kernels.calibration.gptq_factor import damp_hessian
from memopt.kernels.calibration.gptq_options import GptqOptions
from memopt.kernels.calibration.refine import RefinedCodes, refine_codes

DAMPING = torch.tensor([0.01, 0.01], dtype=torch.float64)


def _refined(problem: Problem, codes: Tensor, num_sweeps: int) -> RefinedCodes:
    damped = damp_hessian(problem.hessian, DAMPING[: problem.weight.shape[0]])
    return refine_codes(problem.weight, damped, codes, problem.scale, num_sweeps=num_sweeps)


def _loss(problem: Problem, codes: Tensor, scale: Tensor) -> Tensor:
    return losses(problem.weight, codes, scale, problem.hessian, DAMPING[: problem.weight.shape[0]])


def _oracle(problem: Problem, codes: Tensor, num_sweeps: int) -> tuple[Tensor, Tensor]:
    """The same sweeps in float64, one expert, column by column."""
    matrix = damp_hessian(problem.hessian, DAMPING[:1])[0].double()
    weight, scale, values = problem.weight[0].double(), problem.scale[0].double(), codes[0].double()
    num_columns = weight.shape[1]
    group = num_columns // scale.shape[1]
    for _ in range(num_sweeps):
        for index in range(scale.shape[1]):
            columns = range(index * group, (index + 1) * group)
            part = slice(columns.start, columns.stop)
            gradient = (weight - values * scale.repeat_interleave(group, 1)) @ matrix
            slope = (gradient[:, part] * values[:, part]).sum(1)
            curvature = ((values[:, part] @ matrix[part, part]) * values[:, part]).sum(1)
            best = (scale[:, index] + slope / curvature).float().bfloat16().double()
            change = torch.where(torch.isfinite(best) & (best != 0), best - scale[:, index], 0.0)
            is_gain = 2 * change * slope - change**2 * curvature > 0
            scale[:, index] += torch.where(is_gain, change, 0.0)
            for column in columns:
                gradient = (weight - values * scale.repeat_interleave(group, 1)) @ matrix[:, column]
                target = values[:, column] + gradient / matrix[column, column] / scale[:, index]
                values[:, column] = torch.round(target).clamp(-8, 7)
    return values.to(torch.int8), scale


@pytest.mark.parametrize("size_and_group", [(96, 32), (64, 64), (160, 160)])
@pytest.mark.parametrize("num_sweeps", [1, 3])
def test_the_codes_of_the_float64_oracle(size_and_group: tuple[int, int], num_sweeps: int) -> None:
    size, group = size_and_group
    problem = make_problem((300,), 30, size, group)
    start = plain_codes(problem.weight, problem.scale)
    found = _refined(problem, start, num_sweeps)
    codes, scale = _oracle(problem, start, num_sweeps)
    assert torch.equal(found.codes[0], codes)
    assert torch.equal(found.scale[0].double(), scale)


def test_it_gains_after_a_solve() -> None:
    problem = make_problem((400, 300), 64, 256)
    solved = gptq_solve(problem.weight, problem.hessian, problem.scale, GptqOptions(act_order=True))
    found = _refined(problem, solved.codes, 3)
    before, after = _loss(problem, solved.codes, problem.scale), _loss(problem, found.codes, found.scale)
    assert float(after.sum() / before.sum()) < 0.96


@settings(max_examples=25, deadline=None)
@given(
    num_tokens=st.integers(0, 60),
    size=st.sampled_from([8, 32, 40]),
    num_sweeps=st.integers(0, 3),
    seed=st.integers(0, 10_000),
    dead=st.sets(st.integers(0, 7)),
    twins=st.booleans(),
)
def test_no_row_is_worse_and_dead_columns_are_rounded(
    num_tokens: int, size: int, num_sweeps: int, seed: int, dead: set[int], twins: bool
) -> None:
    problem = make_problem((num_tokens, 5), 9, size, group=8, seed=seed)
    if twins:
        problem.hessian[:, 1] = problem.hessian[:, 0]
        problem.hessian[:, :, 1] = problem.hessian[:, :, 0]
        problem.hessian[:, 1, 1] = problem.hessian[:, 0, 0]
    for column in dead:
        problem.hessian[:, column] = 0.0
        problem.hessian[:, :, column] = 0.0
    start = plain_codes(problem.weight, problem.scale)
    found = _refined(problem, start, num_sweeps)
    before, after = _loss(problem, start, problem.scale), _loss(problem, found.codes, found.scale)
    assert bool((after <= before * (1 + 1e-5) + 1e-12).all())
    assert bool((found.scale != 0).all())
    nearest = plain_codes(problem.weight, found.scale)
    for column in dead:
        assert torch.equal(found.codes[:, :, column], nearest[:, :, column])


def test_rows_and_experts_stand_alone() -> None:
    problem = make_problem((90, 60), 12, 64)
    start = plain_codes(problem.weight, problem.scale)
    whole = _refined(problem, start, 2)
    for expert in range(2):
        one = slice(expert, expert + 1)
        alone = refine_codes(
            problem.weight[one, 3:7].contiguous(),
            damp_hessian(problem.hessian[one], DAMPING[:1]),
            start[one, 3:7].contiguous(),
            problem.scale[one, 3:7].contiguous(),
            num_sweeps=2,
        )
        assert torch.equal(alone.codes, whole.codes[one, 3:7])
        assert torch.equal(alone.scale, whole.scale[one, 3:7])


def test_nothing_to_do_changes_nothing() -> None:
    problem = make_problem((40,), 6, 32)
    start = plain_codes(problem.weight, problem.scale)
    found = _refined(problem, start, 0)
    assert torch.equal(found.codes, start)
    assert torch.equal(found.scale, problem.scale)
    empty = refine_codes(problem.weight[:, :0], problem.hessian, start[:, :0], problem.scale[:, :0], num_sweeps=2)
    assert empty.codes.shape == (1, 0, 32)


def test_refusals() -> None:
    problem = make_problem((40,), 6, 96)
    start = plain_codes(problem.weight, problem.scale)
    with pytest.raises(UsageError, match="-1"):
        refine_codes(problem.weight, problem.hessian, start, problem.scale, num_sweeps=-1)
    scale = torch.ones(1, 6, 5, dtype=torch.bfloat16)
    with pytest.raises(AlignmentError, match="5 scales"):
        refine_codes(problem.weight, problem.hessian, start, scale, num_sweeps=1)
    with pytest.raises(ShapeError, match="hessian"):
        refine_codes(problem.weight, problem.hessian[:, :8, :8].contiguous(), start, problem.scale, num_sweeps=1)
