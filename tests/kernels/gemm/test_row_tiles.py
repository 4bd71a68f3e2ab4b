"""Float32 products on the CPU whose rows do not depend on each other."""

from __future__ import annotations

import pytest
import torch
from gemm_cases import random_choices, random_weight
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.kernels.gemm.int4_gemm import int4_gemm
from memopt.kernels.gemm.int4_weight import Int4Weight
from memopt.kernels.gemm.moe_gemm import moe_gemm
from memopt.kernels.gemm.planar import planar_weight
from memopt.kernels.gemm.row_tiles import ROW_TILE, tiled_matmul
from memopt.kernels.gemm.silu_mul import silu_mul


@given(
    rows=st.integers(1, 3 * ROW_TILE + 1),
    columns=st.integers(1, 200),
    outputs=st.integers(1, 70),
    first=st.integers(0, ROW_TILE),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_a_row_alone_has_the_bits_it_has_among_others(
    rows: int, columns: int, outputs: int, first: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # A slice of rows starts anywhere in memory.
    x = torch.randn(first + rows, columns, generator=generator)[first:]
    weight = torch.randn(outputs, columns, generator=generator)
    together = tiled_matmul(x, weight)
    assert together.shape == (rows, outputs)
    for row in {0, rows // 2, rows - 1}:
        assert torch.equal(tiled_matmul(x[row : row + 1], weight)[0], together[row])
    torch.testing.assert_close(together.double(), x.double() @ weight.double().T, rtol=1e-4, atol=1e-4)


def test_torch_alone_does_not_give_that() -> None:
    """What the tiles are for: rows of torch's own product depend on how many there are."""
    x, weight = torch.randn(64, 256), torch.randn(128, 256)
    whole = x @ weight.T
    assert any(not torch.equal(x[row : row + 1] @ weight.T, whole[row : row + 1]) for row in range(64))


def test_other_types_are_torch_own() -> None:
    x, weight = torch.randn(3, 40).to(torch.bfloat16), torch.randn(5, 40).to(torch.bfloat16)
    assert torch.equal(tiled_matmul(x, weight), x @ weight.T)
    assert tiled_matmul(torch.empty(0, 40), torch.randn(5, 40)).shape == (0, 5)


@pytest.mark.parametrize("size", [3, 48, 64, 1000])
def test_the_activation_is_row_invariant(size: int) -> None:
    gate_up = torch.randn(37, 2 * size) * 3
    together = silu_mul(gate_up, torch.float32)
    for row in range(37):
        assert torch.equal(silu_mul(gate_up[row : row + 1], torch.float32)[0], together[row])
    gate, up = gate_up.double().chunk(2, dim=-1)
    torch.testing.assert_close(together.double(), torch.nn.functional.silu(gate) * up, rtol=1e-6, atol=1e-6)
    assert torch.equal(silu_mul(gate_up, torch.bfloat16), together.to(torch.bfloat16))


@pytest.mark.parametrize("form", [lambda weight: weight, planar_weight], ids=["checkpoint", "planar"])
def test_int4_products_are_row_invariant_in_float32(form: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(form)
    # Several tiles of weights, the last one smaller.
    monkeypatch.setattr("memopt.kernels.gemm.int4_gemm_cpu.TILE_WEIGHTS", 48 * 96)
    stored = random_weight(112, 96, 32)
    weight, x = form(stored), torch.randn(2 * ROW_TILE + 5, 96)
    together = int4_gemm(x, weight)
    for row in (0, 1, ROW_TILE - 1, ROW_TILE, 2 * ROW_TILE + 4):
        assert torch.equal(int4_gemm(x[row : row + 1].clone(), weight)[0], together[row])
    assert torch.equal(int4_gemm(x[3:9].clone(), weight), together[3:9])


@pytest.mark.parametrize("form", [lambda weight: weight, planar_weight], ids=["checkpoint", "planar"])
def test_experts_are_row_invariant_and_exact_in_float32(form: object) -> None:
    assert callable(form)
    gate_up, down = random_weight(64, 96, 32, 4), random_weight(96, 32, 32, 4)
    x = torch.randn(40, 96)
    ids, weights = random_choices(40, 4, 2)
    together = moe_gemm(x, form(gate_up), form(down), ids, weights)
    for row in (0, 7, 39):
        part = slice(row, row + 1)
        alone = moe_gemm(x[part].clone(), form(gate_up), form(down), ids[part].clone(), weights[part].clone())
        assert torch.equal(alone[0], together[row])
    exact = _exact_experts(x, gate_up, down, ids, weights)
    # Hidden values that were rounded to BF16 would be off by 1e-3.
    assert float((together.double() - exact).abs().max() / exact.abs().max()) < 1e-5


def _exact_experts(
    x: torch.Tensor, gate_up: Int4Weight, down: Int4Weight, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    from memopt.kernels.gemm.int4_gemm_reference import weight_values

    total = torch.zeros(x.shape[0], x.shape[1], dtype=torch.float64)
    for token, choice in ((token, choice) for token in range(x.shape[0]) for choice in range(ids.shape[1])):
        expert = int(ids[token, choice])
        gate, up = (weight_values(gate_up.expert(expert)).double() @ x[token].double()).chunk(2)
        hidden = torch.nn.functional.silu(gate) * up
        total[token] += weights[token, choice].double() * (weight_values(down.expert(expert)).double() @ hidden)
    return total
