"""The experts of a layer in the interpreter against the reference: both tile widths, tails, experts of other ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from gemm_cases import exact_values, guarded_planar, largest_error, random_choices, random_weight
from guarded_memory import guarded

from memopt.kernels.gemm.int4_weight import Int4Weight
from memopt.kernels.gemm.moe_gemm_reference import moe_gemm_reference
from memopt.kernels.gemm.moe_gemm_triton import (
    moe_down_kernel,
    moe_gate_up_kernel,
    moe_gemm_triton,
    moe_tile_tokens,
)
from memopt.kernels.gemm.planar import planar_weight

# Of the largest value: a float32 sum in another order may move a hidden value to the next BF16 number.
TOLERANCE = 0.004
# A tile of one slot, padded.
ONE_SLOT = torch.tensor([0] + 7 * [1], dtype=torch.int32)


@pytest.fixture(autouse=True)
def _poisoned_buffers() -> Iterator[None]:
    """torch.empty gives NaN (torch.utils.deterministic.fill_uninitialized_memory), and unordered sums are refused."""
    torch.use_deterministic_algorithms(True)
    assert bool(torch.empty(4).isnan().all())
    yield
    torch.use_deterministic_algorithms(False)


def check(ids: torch.Tensor, experts: int, hidden_size: int, size: int, group_size: int | None) -> None:
    gate_up = random_weight(2 * size, hidden_size, group_size, experts)
    down = random_weight(hidden_size, size, group_size, experts)
    x = torch.randn(ids.shape[0], hidden_size).to(torch.bfloat16)
    weights = torch.rand(ids.shape)
    expected = moe_gemm_reference(x, gate_up, down, ids, weights, torch.empty_like(x))
    out = torch.full_like(x, torch.nan)
    ends = [guarded(tensor) if tensor.numel() else tensor for tensor in (x, ids, weights)]
    moe_gemm_triton(ends[0], guarded_planar(gate_up), guarded_planar(down), *ends[1:], out)
    assert largest_error(out, expected.double(), floor=1.0) < TOLERANCE


def test_one_token_chooses_two_of_many() -> None:
    check(random_choices(1, 64, 2)[0], 64, 64, 32, 32)


def test_few_tokens_over_a_tail_of_hidden_size_and_rows() -> None:
    # 288 = 256 + 32 columns of gate and up, and 4.5 row tiles of down; 48 hidden values are one and a half tiles.
    # The last expert is chosen: past its rows there is no memory.
    check(torch.tensor([[4, 0], [1, 4]], dtype=torch.int32), 5, 288, 48, None)


def test_tiles_of_16_tokens() -> None:
    ids = torch.zeros(18, 1, dtype=torch.int32)
    ids[7] = 1
    assert moe_tile_tokens(18, 2) == 16
    check(ids, 2, 64, 32, 32)


def test_down_of_two_blocks() -> None:
    check(random_choices(2, 3, 2)[0], 3, 128, 320, 64)


def test_experts_of_other_ranks() -> None:
    check(torch.tensor([[-1, 0], [2, 3], [7, -5]], dtype=torch.int64), 3, 64, 64, 64)


def test_no_expert_of_this_rank() -> None:
    check(torch.tensor([[-1], [3]], dtype=torch.int32), 3, 64, 32, 32)


def test_tokens_in_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memopt.kernels.gemm.moe_gemm_triton.MOST_SLOTS_A_LAUNCH", 5)
    check(torch.tensor([[0, 2], [1, -1], [2, 0]], dtype=torch.int32), 3, 64, 32, 32)


def test_no_token() -> None:
    check(torch.zeros(0, 2, dtype=torch.int32), 3, 64, 32, 32)


def last_of_a_large_stack(weight: Int4Weight, num_rows: int, *first_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Planar words and scales of a stack of 2**31 words and more, of which only the last expert's rows are touched.

    Half of the rows of `weight` lie at the first of `first_rows`, the other half at the second; all of them at one.
    """
    planar = planar_weight(weight)
    experts, size = (1 << 26) // num_rows + 2, weight.num_rows // len(first_rows)
    words = torch.from_numpy(np.empty((experts, 1, num_rows, 32), np.int32))
    scales = torch.from_numpy(np.empty((experts, planar.scales.shape[0], num_rows), np.int32))
    assert (experts - 1) * num_rows * 32 > 1 << 31
    for index, first in enumerate(first_rows):
        part = slice(index * size, (index + 1) * size)
        words[-1, :, first : first + size] = planar.words[:, part]
        scales[-1, :, first : first + size] = planar.scales[:, part]
    return words, scales


def test_down_of_a_stack_of_more_words_than_32_bits_count() -> None:
    num_rows, size = 1 << 16, 32
    weight = random_weight(64, size, 32)
    words, scales = last_of_a_large_stack(weight, num_rows, 0)
    hidden = torch.randn(1, size).to(torch.bfloat16)
    choices = torch.full((1, num_rows), torch.nan)
    moe_down_kernel[(1, 1)](
        hidden, words, scales, ONE_SLOT, torch.tensor([len(words) - 1], dtype=torch.int32), choices,
        1, num_rows, size, 1, scales.shape[1],
        TOKENS=8, ROWS=64, ROW_TILES=1, GROUP_SIZE=32, HAS_TAIL=True, USE_ASSEMBLY=False, STAGES=1,
    )  # fmt: skip
    expected = hidden.double() @ exact_values(weight).T
    assert largest_error(choices[:, :64], expected) < 1e-4
    assert bool(choices[:, 64:].isnan().all())


def test_gate_and_up_of_a_stack_of_more_words_than_32_bits_count() -> None:
    hidden_size, size = 1 << 15, 32
    weight = random_weight(64, size, 32)
    words, scales = last_of_a_large_stack(weight, 2 * hidden_size, 0, hidden_size)
    x = torch.randn(1, size).to(torch.bfloat16)
    hidden = torch.full((1, hidden_size), torch.nan, dtype=torch.bfloat16)
    moe_gate_up_kernel[(1, 1)](
        x, words, scales, ONE_SLOT, torch.tensor([len(words) - 1], dtype=torch.int32), hidden,
        1, 1, hidden_size, size, 1, scales.shape[1],
        TOKENS=8, ROWS=64, GROUP_SIZE=32, HAS_TAIL=True, USE_ASSEMBLY=False, STAGES=1,
    )  # fmt: skip
    gate, up = (x.double() @ exact_values(weight).T).chunk(2, dim=1)
    assert largest_error(hidden[:, :32], torch.nn.functional.silu(gate) * up, floor=1.0) < TOLERANCE
    assert bool(hidden[:, 32:].isnan().all())
