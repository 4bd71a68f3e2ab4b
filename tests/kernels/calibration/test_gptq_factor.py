"""The triangular factor of GPTQ: its definition, damping, dead columns, order."""

from __future__ import annotations

import pytest
import torch
from calibration_problems import make_problem
from torch import Tensor

from memopt.errors import ContentError
from memopt.kernels.calibration import gptq_factor
from memopt.kernels.calibration.gptq_factor import damp_hessian, factorize_hessian, factorize_hessians, invert_upper
from memopt.kernels.calibration.gptq_options import GptqOptions


def _damped(hessian: Tensor, damping: float) -> Tensor:
    matrix = hessian.double().clone()
    matrix.diagonal().add_(damping * hessian.diagonal().double().mean())
    return matrix


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("size", [1, 2, 37, 300])
def test_it_is_the_upper_cholesky_factor_of_the_inverse(size: int, act_order: bool) -> None:
    hessian = make_problem((400,), 1, size, group=1).hessian[0]
    factor = factorize_hessian(hessian, GptqOptions(act_order=act_order))
    matrix = _damped(hessian, 0.01)[factor.order][:, factor.order]
    expected = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(matrix)), upper=True)
    scale = expected.diagonal()[:, None]
    torch.testing.assert_close(factor.upper.double() / scale, expected / scale, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(factor.root.double() @ factor.root.double().T, matrix, rtol=1e-5, atol=1e-4)
    assert torch.equal(factor.upper, factor.upper.triu())
    assert torch.equal(factor.root, factor.root.triu())


@pytest.mark.parametrize("size", [1, 3, 16, 17, 100])
def test_a_triangle_is_inverted_by_halves(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gptq_factor, "SOLVED_SIZE", 4)
    matrix = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size)).triu(1) * 0.1
    matrix.diagonal().fill_(1.5)
    identity = torch.eye(size, dtype=torch.float64)
    torch.testing.assert_close(invert_upper(matrix) @ matrix, identity, rtol=0.0, atol=1e-12)


def test_act_order_falls_and_ties_keep_their_place() -> None:
    hessian = torch.diag(torch.tensor([2.0, 5.0, 2.0, 7.0, 2.0]))
    assert factorize_hessian(hessian, GptqOptions(act_order=True)).order.tolist() == [3, 1, 0, 2, 4]
    assert factorize_hessian(hessian, GptqOptions()).order.tolist() == [0, 1, 2, 3, 4]


def test_dead_columns_stand_alone_and_do_not_lower_the_damping() -> None:
    alive = make_problem((60,), 1, 20, group=1).hessian[0]
    padded = torch.zeros(24, 24)
    padded[:20, :20] = alive
    factor, expected = factorize_hessian(padded, GptqOptions()), factorize_hessian(alive, GptqOptions())
    assert (factor.num_dead_columns, expected.num_dead_columns) == (4, 0)
    torch.testing.assert_close(factor.upper[:20, :20], expected.upper, rtol=1e-6, atol=1e-9)
    assert torch.equal(factor.upper[:20, 20:], torch.zeros(20, 4))
    assert torch.equal(factor.upper[20:, 20:], torch.diag(factor.upper[20:, 20:].diagonal()))


def test_no_tokens_at_all() -> None:
    factor = factorize_hessian(torch.zeros(6, 6), GptqOptions(damping=0.0))
    assert factor.num_dead_columns == 6
    assert torch.equal(factor.upper, torch.eye(6))


def test_damping_rises_until_it_works_and_is_recorded() -> None:
    # Eigenvalues 3.5 and -1.5: the mean diagonal is 1, so that the first damping above 1.5 works.
    hessian = torch.tensor([[1.0, 2.5], [2.5, 1.0]])
    assert factorize_hessian(hessian, GptqOptions(damping=0.02)).damping == pytest.approx(2.0)
    assert factorize_hessian(hessian, GptqOptions(damping=0.0)).damping == pytest.approx(10.0)
    singular = torch.ones(3, 3)
    assert factorize_hessian(singular, GptqOptions(damping=0.0)).damping == pytest.approx(0.001)
    assert factorize_hessian(singular, GptqOptions(damping=0.01)).damping == 0.01


def test_one_triangle_alone_is_refused() -> None:
    hessian = make_problem((60,), 1, 20, group=1).hessian[0]
    nearly = hessian.clone()
    nearly[3, 7] *= 1.0 + 1e-6
    factorize_hessian(nearly, GptqOptions())
    for half in (hessian.triu(), hessian.tril()):
        with pytest.raises(ContentError, match=r"Hessian of expert 3.*not symmetric"):
            factorize_hessian(half, GptqOptions(), expert=3)


@pytest.mark.parametrize(
    "hessian", [torch.tensor([[1.0, 50.0], [50.0, 1.0]]), torch.tensor([[-1.0, 0.0], [0.0, -1.0]])]
)
def test_what_is_no_hessian_is_refused(hessian: Tensor) -> None:
    with pytest.raises(ContentError, match=r"Hessian of expert 7.*not positive definite"):
        factorize_hessian(hessian, GptqOptions(), expert=7)


@pytest.mark.parametrize("act_order", [False, True])
def test_importance_is_what_a_columns_error_costs(act_order: bool) -> None:
    problem = make_problem((80, 30), 4, 24, group=8)
    factors = factorize_hessians(problem.hessian, GptqOptions(act_order=act_order), with_roots=False)
    assert factors.roots == ()
    for expert in range(2):
        damped = damp_hessian(problem.hessian, factors.damping)[expert].double()
        order = factors.order[expert].tolist()
        cost = torch.empty(24, dtype=torch.float64)
        for step, column in enumerate(order):
            # The Schur complement: what the columns behind cannot take up.
            behind = order[step + 1 :]
            taken = damped[column, behind] @ torch.linalg.solve(damped[behind][:, behind], damped[behind, column])
            cost[column] = damped[column, column] - (taken if behind else 0.0)
        torch.testing.assert_close(
            factors.importance[expert].double(), cost / cost.max(), rtol=1e-3, atol=0, check_dtype=False
        )


def test_a_damped_hessian_is_what_was_factorized() -> None:
    problem = make_problem((60, 0), 4, 24, group=8)
    problem.hessian[0, 3] = 0.0
    problem.hessian[0, :, 3] = 0.0
    factors = factorize_hessians(problem.hessian, GptqOptions(), with_roots=True)
    damped = damp_hessian(problem.hessian, factors.damping)
    for expert in range(2):
        root = factors.roots[expert].double()
        torch.testing.assert_close(root @ root.T, damped[expert].double(), rtol=1e-5, atol=1e-5)
    assert torch.equal(damped[1], 1.01 * torch.eye(24))
    assert factors.num_dead_columns.tolist() == [1, 24]
