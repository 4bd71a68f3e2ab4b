"""The Triton kernel of a GPTQ block in the interpreter: the bits of the reference."""

from __future__ import annotations

import pytest
import torch
from calibration_problems import make_block, make_problem
from guarded_memory import guarded

from memopt.errors import UsageError
from memopt.kernels.calibration import gptq
from memopt.kernels.calibration.gptq_block_reference import gptq_block_reference
from memopt.kernels.calibration.gptq_block_triton import gptq_block_triton
from memopt.kernels.calibration.gptq_options import GptqOptions


@pytest.mark.parametrize(
    ("num_experts", "num_columns", "num_rows"),
    [
        (2, 16, 40),  # two tiles of rows, one ragged
        (1, 128, 32),  # the block of production
        (1, 5, 3),  # less than a tile either way
        (1, 1, 1),
        (0, 8, 8),
        (1, 8, 0),
    ],
)
def test_the_bits_of_the_reference(num_experts: int, num_columns: int, num_rows: int) -> None:
    block = make_block(num_experts, num_columns, num_rows, num_groups=3, seed=num_rows)
    codes, errors = torch.full(block.weights.shape, 99, dtype=torch.int8), torch.full(block.weights.shape, torch.nan)
    expected_codes, expected_errors = codes.clone(), errors.clone()
    tensors = [block.weights, block.factor, block.scales, block.groups, codes, errors]
    if codes.numel():
        tensors = [guarded(tensor) for tensor in tensors]
    gptq_block_triton(*tensors)
    codes, errors = tensors[-2:]
    gptq_block_reference(block.weights, block.factor, block.scales, block.groups, expected_codes, expected_errors)
    assert torch.equal(codes, expected_codes)
    assert torch.equal(errors, expected_errors)


def test_slices_of_larger_tensors_and_nothing_beside_them() -> None:
    whole = make_block(2, 24, 10, num_groups=2, seed=1)
    part = slice(8, 20)
    codes = torch.full((2, 24, 10), 99, dtype=torch.int8)
    errors, expected_errors = torch.full((2, 12, 10), torch.nan), torch.empty(2, 12, 10)
    expected = torch.empty(2, 12, 10, dtype=torch.int8)
    arguments = (whole.weights[:, part], whole.factor[:, part, part], whole.scales, whole.groups[:, part])
    gptq_block_triton(*arguments, codes[:, part], errors)
    gptq_block_reference(*arguments, expected, expected_errors)
    assert torch.equal(codes[:, part], expected)
    assert torch.equal(errors, expected_errors)
    assert bool((codes[:, :8] == 99).all() and (codes[:, 20:] == 99).all())


def test_ties_go_to_the_even_code_and_the_ends_are_clamped() -> None:
    weights = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 7.5, 8.4, 900.0, -8.5, -900.0])[None, None]
    codes, errors = torch.empty(1, 1, 10, dtype=torch.int8), torch.empty(1, 1, 10)
    groups = torch.zeros(1, 1, dtype=torch.int32)
    gptq_block_triton(weights, torch.full((1, 1, 1), 0.5), torch.ones(1, 1, 10), groups, codes, errors)
    assert codes.flatten().tolist() == [0, 2, 2, 0, -2, 7, 7, 7, -8, -8]
    assert torch.equal(errors, (weights - codes) / 0.5)


@pytest.mark.parametrize("act_order", [False, True])
def test_a_whole_solve_gives_the_codes_of_the_cpu(act_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem((70, 20), 20, 72, group=24)
    options = GptqOptions(act_order=act_order, block_columns=32)
    expected = gptq.gptq_solve(problem.weight, problem.hessian, problem.scale, options)
    monkeypatch.setattr(gptq, "gptq_block_cpu", gptq_block_triton)
    found = gptq.gptq_solve(problem.weight, problem.hessian, problem.scale, options)
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.loss, expected.loss)


def test_more_columns_than_the_registers_hold() -> None:
    block = make_block(1, 129, 4, num_groups=1, seed=0)
    codes, errors = torch.empty(block.weights.shape, dtype=torch.int8), torch.empty(block.weights.shape)
    with pytest.raises(UsageError, match="block of 129 columns"):
        gptq_block_triton(block.weights, block.factor, block.scales, block.groups, codes, errors)
