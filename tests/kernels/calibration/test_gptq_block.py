"""One column block of GPTQ: the numba path gives the bits of the reference."""

from __future__ import annotations

import torch
from calibration_problems import make_block
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.kernels.calibration.gptq_block_cpu import TILE_ROWS, gptq_block_cpu
from memopt.kernels.calibration.gptq_block_reference import gptq_block_reference


@settings(max_examples=40, deadline=None)
@given(
    num_experts=st.integers(0, 3),
    num_columns=st.integers(1, 40),
    num_rows=st.integers(0, 2 * TILE_ROWS + 3),
    seed=st.integers(0, 1000),
)
def test_the_bits_of_the_reference(num_experts: int, num_columns: int, num_rows: int, seed: int) -> None:
    block = make_block(num_experts, num_columns, num_rows, num_groups=3, seed=seed)
    codes, errors = torch.full(block.weights.shape, 99, dtype=torch.int8), torch.full(block.weights.shape, torch.nan)
    expected_codes, expected_errors = codes.clone(), errors.clone()
    gptq_block_cpu(block.weights, block.factor, block.scales, block.groups, codes, errors)
    gptq_block_reference(block.weights, block.factor, block.scales, block.groups, expected_codes, expected_errors)
    assert torch.equal(codes, expected_codes)
    assert torch.equal(errors, expected_errors)


def test_slices_of_larger_tensors() -> None:
    whole = make_block(2, 48, 10, num_groups=3, seed=1)
    part = slice(16, 40)
    codes, errors = torch.zeros(2, 48, 10, dtype=torch.int8), torch.empty(2, 24, 10)
    factor = whole.factor[:, part, part]
    gptq_block_cpu(whole.weights[:, part], factor, whole.scales, whole.groups[:, part], codes[:, part], errors)
    expected = torch.empty(2, 24, 10, dtype=torch.int8)
    gptq_block_reference(
        whole.weights[:, part], factor, whole.scales, whole.groups[:, part], expected, torch.empty(2, 24, 10)
    )
    assert torch.equal(codes[:, part], expected)
    assert int(codes[:, :16].abs().sum() + codes[:, 40:].abs().sum()) == 0


def test_ties_go_to_the_even_code_and_the_ends_are_clamped() -> None:
    weights = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 7.5, 8.4, 900.0, -8.5, -900.0])[None, None]
    block = make_block(1, 1, 10, num_groups=1, seed=0)
    codes, errors = torch.empty(1, 1, 10, dtype=torch.int8), torch.empty(1, 1, 10)
    gptq_block_cpu(weights, torch.full((1, 1, 1), 0.5), torch.ones(1, 1, 10), block.groups * 0, codes, errors)
    assert codes.flatten().tolist() == [0, 2, 2, 0, -2, 7, 7, 7, -8, -8]
    assert torch.equal(errors, (weights - codes) / 0.5)


def test_a_zero_error_corrects_nothing() -> None:
    weights = torch.tensor([[3.0], [0.6]])[None]
    factor = torch.tensor([[1.0, 100.0], [0.0, 1.0]])[None]
    codes, errors = torch.empty(1, 2, 1, dtype=torch.int8), torch.empty(1, 2, 1)
    gptq_block_cpu(weights, factor, torch.ones(1, 1, 1), torch.zeros(1, 2, dtype=torch.int32), codes, errors)
    assert codes.flatten().tolist() == [3, 1]
