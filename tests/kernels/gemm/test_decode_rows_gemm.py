"""Products of one row and of a few, a router's choices and the order of experts on the CPU, against plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.kernels.gemm.few_rows_matmul_cpu import (
    MAX_PRODUCTS,
    few_rows_head_matmul,
    few_rows_matmul,
    is_small_product,
)
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


@settings(max_examples=40, deadline=None)
@given(num_rows=st.integers(1, 17), num_columns=st.integers(1, 21), size=st.integers(1, 70))
def test_few_rows_times_a_weight(num_rows: int, num_columns: int, size: int) -> None:
    """At every place of a block and of what is left of one, and each row alone."""
    x, weight = halves(num_rows, size, seed=num_rows), halves(num_columns, size, seed=num_columns)
    assert is_small_product(x, weight)
    product = few_rows_matmul(x, weight)
    exact = x.double() @ weight.double().T
    assert (product.double() - exact).abs().max() <= 2**-8 * exact.abs().max() + 1e-6
    assert torch.equal(product[-1:], few_rows_matmul(x[-1:], weight))


@settings(max_examples=40, deadline=None)
@given(num_rows=st.integers(1, 9), size=st.integers(1, 40), latent=st.integers(1, 40), is_transposed=st.booleans())
def test_few_rows_times_each_heads_matrix(num_rows: int, size: int, latent: int, is_transposed: bool) -> None:
    # Rows of a view, as a query's first part is.
    x = halves(num_rows, 3, size + 5, seed=1)[:, :, :size]
    weights = halves(3, latent, size, seed=2).mT if is_transposed else halves(3, size, latent, seed=2)
    product = few_rows_head_matmul(x, weights)
    exact = torch.bmm(x.double().transpose(0, 1), weights.double()).transpose(0, 1)
    assert (product.double() - exact).abs().max() <= 2**-8 * exact.abs().max() + 1e-6
    assert torch.equal(product[-1:], few_rows_head_matmul(x[-1:], weights))


def test_what_is_a_small_product() -> None:
    x, weight = halves(16, 256, seed=1), halves(128, 256, seed=2)
    assert not is_small_product(x.float(), weight.float())
    assert not is_small_product(x[:0], weight)
    largest = torch.empty(MAX_PRODUCTS // 16, 1, dtype=torch.bfloat16)
    assert is_small_product(x, largest)
    assert not is_small_product(x, torch.cat((largest, largest[:1])))


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
@given(
    ids=st.lists(st.lists(st.integers(-2, 6), min_size=3, max_size=3), min_size=1, max_size=9),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_order_and_sum_of_choices(ids: list[list[int]], dtype: torch.dtype) -> None:
    num_experts = 5
    x = torch.arange(len(ids))[:, None].to(dtype).expand(-1, 3).contiguous()
    choices = ordered_choices(x, torch.tensor(ids), num_experts)
    in_order = [(e, t) for e in range(num_experts) for t, row in enumerate(ids) for i in row if i == e]
    assert choices.rows.dtype == dtype
    assert choices.rows.tolist() == [[token] * 3 for _, token in in_order]
    assert [b - a for a, b in zip(choices.starts, choices.starts[1:], strict=False)] == [
        sum(e == found for found, _ in in_order) for e in range(num_experts)
    ]
    results = torch.tensor([[float(e), 1.0] for e, _ in in_order]).view(-1, 2)
    weights = torch.arange(1.0, 3 * len(ids) + 1).view(-1, 3)
    total = summed_choices(results, choices, weights, torch.empty(len(ids), 2))
    is_here = torch.tensor([[0 <= i < num_experts for i in row] for row in ids])
    expected = torch.stack((torch.where(is_here, torch.tensor(ids), 0) * weights, is_here * weights), dim=-1).sum(1)
    assert torch.equal(total, expected)
