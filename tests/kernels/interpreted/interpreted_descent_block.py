"""The Triton kernel of a block of coordinate descent in the interpreter: the bits of the reference."""

from __future__ import annotations

import pytest
import torch
from calibration_problems import make_problem, plain_codes
from descent_problems import make_descent_block
from guarded_memory import guarded

from memopt.errors import UsageError
from memopt.kernels.calibration import refine
from memopt.kernels.calibration.descent_block_reference import descend_block_reference
from memopt.kernels.calibration.descent_block_triton import descend_block_triton
from memopt.kernels.calibration.gptq_factor import damp_hessian


@pytest.mark.parametrize(
    ("num_experts", "num_columns", "num_rows"),
    [
        (2, 32, 40),  # the group of production, two tiles of rows, one ragged
        (1, 128, 32),
        (1, 5, 3),  # less than a tile either way
        (1, 1, 1),
        (0, 8, 8),
        (1, 8, 0),
    ],
)
def test_the_bits_of_the_reference(num_experts: int, num_columns: int, num_rows: int) -> None:
    block = make_descent_block(num_experts, num_columns, num_rows, seed=num_rows)
    expected = block.codes.clone()
    descend_block_reference(block.gradient, block.hessian, block.scale, expected)
    tensors = [block.gradient, block.hessian, block.scale, block.codes]
    if block.codes.numel():
        tensors = [guarded(tensor) for tensor in tensors]
    descend_block_triton(*tensors)
    assert torch.equal(tensors[-1], expected)


def test_slices_of_larger_tensors_and_nothing_beside_them() -> None:
    block = make_descent_block(2, 24, 10, seed=1)
    part = slice(8, 20)
    expected = block.codes.clone()
    descend_block_reference(block.gradient[:, part], block.hessian[:, part, part], block.scale, expected[:, part])
    descend_block_triton(block.gradient[:, part], block.hessian[:, part, part], block.scale, block.codes[:, part])
    assert torch.equal(block.codes, expected)


def test_whole_sweeps_give_the_codes_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem((70, 20), 20, 64, group=32)
    codes = plain_codes(problem.weight, problem.scale)
    damped = damp_hessian(problem.hessian, torch.tensor([0.01, 0.01], dtype=torch.float64))
    expected = refine.refine_codes(problem.weight, damped, codes, problem.scale, num_sweeps=2)
    monkeypatch.setattr(refine, "descend_block_cpu", descend_block_triton)
    found = refine.refine_codes(problem.weight, damped, codes, problem.scale, num_sweeps=2)
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scale, expected.scale)


def test_more_columns_than_the_registers_hold() -> None:
    block = make_descent_block(1, 129, 4, seed=0)
    with pytest.raises(UsageError, match="block of 129 columns"):
        descend_block_triton(block.gradient, block.hessian, block.scale, block.codes)
