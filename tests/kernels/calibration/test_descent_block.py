"""One column block of coordinate descent: the numba path gives the bits of the reference, and no step is uphill."""

from __future__ import annotations

import torch
from descent_problems import make_descent_block
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.kernels.calibration.descent_block_cpu import TILE_ROWS, descend_block_cpu
from memopt.kernels.calibration.descent_block_reference import descend_block_reference


@settings(max_examples=40, deadline=None)
@given(
    num_experts=st.integers(0, 3),
    num_columns=st.integers(1, 40),
    num_rows=st.integers(0, 2 * TILE_ROWS + 3),
    seed=st.integers(0, 1000),
)
def test_the_bits_of_the_reference(num_experts: int, num_columns: int, num_rows: int, seed: int) -> None:
    block = make_descent_block(num_experts, num_columns, num_rows, seed)
    gradient, hessian, scale, codes = block.gradient, block.hessian, block.scale, block.codes
    before, expected = gradient.clone(), codes.clone()
    descend_block_reference(gradient, hessian, scale, expected)
    descend_block_cpu(gradient, hessian, scale, codes)
    assert torch.equal(codes, expected)
    assert torch.equal(gradient, before)


def test_slices_of_larger_tensors() -> None:
    block = make_descent_block(2, 24, 10, seed=1)
    gradient, hessian, scale, codes = block.gradient, block.hessian, block.scale, block.codes
    part = slice(8, 20)
    expected = codes.clone()
    descend_block_reference(gradient[:, part], hessian[:, part, part], scale, expected[:, part])
    descend_block_cpu(gradient[:, part], hessian[:, part, part], scale, codes[:, part])
    assert torch.equal(codes, expected)


def test_each_column_gets_its_best_code_while_the_others_stay() -> None:
    block = make_descent_block(1, 6, 20, seed=2)
    gradient, hessian, scale, codes = block.gradient, block.hessian, block.scale, block.codes
    wanted = torch.linalg.solve(hessian.double(), gradient.double()) + codes.double() * scale.double()[:, None]
    expected = codes.clone()
    for column in range(6):
        trials = []
        for code in range(-8, 8):
            trial = expected.clone()
            trial[:, column] = code
            difference = wanted - trial.double() * scale.double()[:, None]
            trials.append(((hessian.double() @ difference) * difference).sum(dim=1))
        expected[:, column] = (torch.stack(trials).argmin(dim=0) - 8).to(torch.int8)
    descend_block_cpu(gradient, hessian, scale, codes)
    assert torch.equal(codes, expected)


def test_ties_go_to_the_even_code_and_the_ends_are_clamped() -> None:
    wanted = torch.tensor([0.5, 1.5, 2.5, -0.5, 7.5, 900.0, -8.5, -900.0])
    codes = torch.zeros(1, 1, 8, dtype=torch.int8)
    descend_block_cpu(wanted[None, None] * 2, torch.full((1, 1, 1), 2.0), torch.ones(1, 8), codes)
    assert codes.flatten().tolist() == [0, 2, 2, 0, 7, 7, -8, -8]
