"""A single row's products, a router's choices and the order of experts on the CPU, against plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.kernels.gemm.gemv_cpu import is_single_row, row_head_matmul, row_matmul
from memopt.kernels.gemm.moe_rows import choose_on_cpu, ordered_choices, summed_choices


def halves(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (7, 33), (64, 256)])
def test_one_row_times_a_weight(num_rows: int, size: int) -> None:
    x, weight = halves(1, size, seed=1), halves(num_rows, size, seed=2)
    assert is_single_row(x, weight)
    assert not is_single_row(x.float(), weight)
    exact = x.double() @ weight.double().T
    assert (row_matmul(x, weight).double() - exact).abs().max() <= 2**-8 * exact.abs().max() + 1e-6


@pytest.mark.parametrize("is_transposed", [False, True])
def test_one_row_times_each_heads_matrix(is_transposed: bool) -> None:
    x = halves(1, 3, 22, seed=1)
    weights = halves(3, 35, 22, seed=2).mT if is_transposed else halves(3, 22, 35, seed=2)
    exact = torch.bmm(x.double().transpose(0, 1), weights.double()).transpose(0, 1)
    assert (row_head_matmul(x, weights).double() - exact).abs().max() <= 2**-8 * exact.abs().max()


@settings(max_examples=30, deadline=None)
@given(groups=st.sampled_from([(1, 1), (4, 2), (4, 1)]), num_choices=st.integers(1, 4), seed=st.integers(0, 2**16))
def test_choices_equal_torchs_top_k(groups: tuple[int, int], num_choices: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    products, bias = torch.randn(5, 16, generator=generator), torch.randn(16, generator=generator)
    ids, weights = choose_on_cpu(
        products, bias, num_choices=num_choices, num_groups=groups[0], groups_per_token=groups[1],
        is_renormalized=True, smallest_sum=1e-20, factor=2.5,
    )  # fmt: skip
    scores = products.sigmoid()
    choice = scores + bias
    best = choice.view(5, groups[0], -1).topk(2, dim=-1).values.sum(dim=-1).topk(groups[1], dim=-1).indices
    is_open = torch.zeros(5, groups[0], dtype=torch.bool).scatter(1, best, True)
    choice = choice.masked_fill(~is_open.repeat_interleave(16 // groups[0], dim=1), -torch.inf)
    expected = choice.topk(num_choices).indices.sort().values
    assert torch.equal(ids, expected)
    chosen = scores.gather(1, expected)
    torch.testing.assert_close(weights, 2.5 * chosen / chosen.sum(dim=-1, keepdim=True))


@settings(max_examples=30, deadline=None)
@given(ids=st.lists(st.lists(st.integers(-2, 6), min_size=3, max_size=3), min_size=1, max_size=9))
def test_order_and_sum_of_choices(ids: list[list[int]]) -> None:
    num_experts = 5
    choices = ordered_choices(torch.tensor(ids), num_experts)
    in_order = [(e, t) for e in range(num_experts) for t, row in enumerate(ids) for i in row if i == e]
    assert choices.tokens.tolist() == [token for _, token in in_order]
    assert [b - a for a, b in zip(choices.starts, choices.starts[1:], strict=False)] == [
        sum(e == found for found, _ in in_order) for e in range(num_experts)
    ]
    results = torch.tensor([[float(e), 1.0] for e, _ in in_order]).view(-1, 2)
    weights = torch.arange(1.0, 3 * len(ids) + 1).view(-1, 3)
    total = summed_choices(results, choices, weights, torch.empty(len(ids), 2))
    is_here = torch.tensor([[0 <= i < num_experts for i in row] for row in ids])
    expected = torch.stack((torch.where(is_here, torch.tensor(ids), 0) * weights, is_here * weights), dim=-1).sum(1)
    assert torch.equal(total, expected)
