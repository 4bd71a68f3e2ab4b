"""The sorting of slots in the interpreter: the same tiles as the torch version, any ids."""

from __future__ import annotations

import pytest
import torch

from memopt.kernels.gemm.moe_routing import expert_tiles
from memopt.kernels.gemm.moe_routing_triton import MOST_SLOTS, expert_tiles_triton


def check(ids: torch.Tensor, num_experts: int, tile_tokens: int) -> None:
    torch.use_deterministic_algorithms(True)  # torch.empty is filled with values that no tile holds
    found = expert_tiles_triton(ids, num_experts, tile_tokens)
    torch.use_deterministic_algorithms(False)
    wanted = expert_tiles(ids, num_experts, tile_tokens)
    assert found.num_tiles == wanted.num_tiles
    assert torch.equal(found.slots, wanted.slots)
    assert torch.equal(found.experts, wanted.experts)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tile_tokens", [8, 16])
@pytest.mark.parametrize(("num_tokens", "num_experts"), [(1, 256), (1, 3), (5, 8), (16, 384), (33, 4), (2, 1)])
def test_random_ids(num_tokens: int, num_experts: int, tile_tokens: int, dtype: torch.dtype) -> None:
    check(torch.randint(0, num_experts, (num_tokens, 8), dtype=dtype), num_experts, tile_tokens)
    check(torch.randint(-2, num_experts + 2, (num_tokens, 8), dtype=dtype), num_experts, tile_tokens)


def test_all_slots_choose_one_expert() -> None:
    check(torch.full((17, 1), 3, dtype=torch.int32), 5, 8)
    check(torch.full((16, 1), 0, dtype=torch.int32), 1, 16)


def test_no_slot_is_of_this_rank() -> None:
    check(torch.full((3, 2), -1, dtype=torch.int32), 4, 8)


def test_the_most_slots_and_one_token_more() -> None:
    check(torch.randint(0, 64, (MOST_SLOTS // 8, 8), dtype=torch.int32), 64, 16)
    check(torch.randint(0, 64, (MOST_SLOTS // 8 + 1, 8), dtype=torch.int32), 64, 16)
