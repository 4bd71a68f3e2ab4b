"""The experts of a layer on the CPU against float64, and what the wrapper refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gemm_cases import exact_moe, largest_error, random_choices, random_weight

from memopt.errors import ShapeError, UsageError
from memopt.kernels.gemm.moe_gemm import moe_gemm
from memopt.kernels.gemm.planar import planar_weight
from memopt.kernels.gemm.torch_int4_weight import torch_int4_weight

# Of the largest value: the hidden values and the result are rounded to BF16, in torch's form every product as well.
TOLERANCE, TORCH_TOLERANCE = 0.005, 0.012


@pytest.mark.parametrize("group", [32, 64, None])
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 40])
def test_every_form_against_float64(group: int | None, num_tokens: int) -> None:
    experts, hidden_size, size = 6, 128, 64
    gate_up, down = (
        random_weight(2 * size, hidden_size, group, experts),
        random_weight(hidden_size, size, group, experts),
    )
    x = torch.randn(num_tokens, hidden_size).to(torch.bfloat16)
    ids, weights = random_choices(num_tokens, experts, 3)
    if num_tokens > 1:
        ids[0, 0], ids[1, 2] = -1, experts  # experts of other ranks
    expected = exact_moe(x, gate_up, down, ids, weights)
    for make, tolerance in (
        (lambda weight: weight, TOLERANCE),
        (planar_weight, TOLERANCE),
        (torch_int4_weight, TORCH_TOLERANCE),
    ):
        out = torch.full((num_tokens, hidden_size), torch.nan, dtype=torch.bfloat16)
        result = moe_gemm(x, make(gate_up), make(down), ids, weights, out)
        assert result is out
        assert largest_error(result, expected, floor=1.0) < tolerance
        assert torch.equal(result, moe_gemm(x, make(gate_up), make(down), ids.to(torch.int64), weights))


def test_the_checkpoint_form_is_the_reference_to_float32() -> None:
    gate_up, down = random_weight(64, 96, 32, 4), random_weight(96, 32, 32, 4)
    x = torch.randn(7, 96)
    ids, weights = random_choices(7, 4, 2)
    reference = moe_gemm(x, planar_weight(gate_up), planar_weight(down), ids, weights)
    result = moe_gemm(x, gate_up, down, ids, weights)
    # A float32 sum in another order may move a hidden value to the next BF16 number.
    assert largest_error(result, reference.double(), floor=1.0) < TOLERANCE
    assert (result - reference).abs().median() < 1e-5 * reference.abs().max()


def test_a_choice_of_another_rank_adds_nothing() -> None:
    gate_up, down = random_weight(64, 64, 32, 3), random_weight(64, 32, 32, 3)
    x = torch.randn(2, 64)
    weights = torch.ones(2, 1)
    for form in (lambda weight: weight, planar_weight):
        result = moe_gemm(x, form(gate_up), form(down), torch.tensor([[-1], [3]], dtype=torch.int32), weights)
        assert not bool(result.any())


def test_what_does_not_fit_is_refused() -> None:
    gate_up, down = random_weight(64, 96, 32, 4), random_weight(96, 32, 32, 4)
    x = torch.zeros(5, 96)
    ids, weights = random_choices(5, 4, 2)
    with pytest.raises(ShapeError, match=r"down is one weight \[96, 32\]"):
        moe_gemm(x, gate_up, down.expert(0), ids, weights)
    with pytest.raises(ShapeError, match="a stack of 3, but a stack of 4"):
        moe_gemm(x, random_weight(64, 96, 32, 3), down, ids, weights)
    with pytest.raises(ShapeError, match=r"needs \[64, 96\]"):
        moe_gemm(x, random_weight(32, 96, 32, 4), down, ids, weights)
    with pytest.raises(ShapeError, match=r"x is \[5, 64\], but \[any, 96\]"):
        moe_gemm(x[:, :64].contiguous(), gate_up, down, ids, weights)
    with pytest.raises(ShapeError, match=r"expert_ids is \[4, 2\], but \[5, any\]"):
        moe_gemm(x, gate_up, down, ids[:4], weights)
    with pytest.raises(ShapeError, match=r"expert_weights is \[5, 1\], but \[5, 2\]"):
        moe_gemm(x, gate_up, down, ids, weights[:, :1].contiguous())
    with pytest.raises(ShapeError, match="float64"):
        moe_gemm(x, gate_up, down, ids, weights.double())
    with pytest.raises(ShapeError, match=r"out is \[5, 95\]"):
        moe_gemm(x, gate_up, down, ids, weights, torch.empty(5, 95))
    with pytest.raises(UsageError, match="one is planar"):
        moe_gemm(x, planar_weight(gate_up), down, ids, weights)
    there = replace(gate_up, packed=gate_up.packed.to("meta"), scale_bits=gate_up.scale_bits.to("meta"))
    with pytest.raises(ShapeError, match="x is on cpu, the INT4 weight on meta"):
        moe_gemm(x, there, down, ids, weights)
