"""Tiles of slots by expert: every slot once, tiles of one expert, padding, bounds that no routing passes."""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memopt.kernels.gemm.moe_routing import NO_EXPERT, expert_tiles, max_tiles


def check_tiles(ids: torch.Tensor, num_experts: int, tile_tokens: int) -> None:
    tiles = expert_tiles(ids, num_experts, tile_tokens)
    flat = ids.reshape(-1).tolist()
    assert tiles.num_tiles == max_tiles(len(flat), num_experts, tile_tokens)
    assert tiles.slots.dtype == tiles.experts.dtype == torch.int32
    assert tiles.slots.shape == (tiles.num_tiles * tile_tokens,)
    expected: list[tuple[int, list[int]]] = []
    for expert in range(num_experts):
        slots = [slot for slot, chosen in enumerate(flat) if chosen == expert]
        expected += [(expert, slots[at : at + tile_tokens]) for at in range(0, len(slots), tile_tokens)]
    assert len(expected) <= tiles.num_tiles
    experts = [expert for expert, _ in expected] + [NO_EXPERT] * (tiles.num_tiles - len(expected))
    assert tiles.experts.tolist() == experts
    padded = [slots + [len(flat)] * (tile_tokens - len(slots)) for _, slots in expected]
    unused = [len(flat)] * tile_tokens
    rows = tiles.slots.view(tiles.num_tiles, tile_tokens).tolist()
    assert rows == padded + [unused] * (tiles.num_tiles - len(padded))


@settings(max_examples=150, deadline=None)
@given(
    num_experts=st.integers(1, 12),
    ids=st.lists(st.integers(-1, 12), max_size=60),
    top_k=st.integers(1, 4),
    tile_tokens=st.sampled_from([1, 2, 8, 16]),
)
@example(num_experts=1, ids=[0] * 17, top_k=1, tile_tokens=16)
@example(num_experts=4, ids=[3] * 16, top_k=1, tile_tokens=16)
@example(num_experts=4, ids=[-1, -1], top_k=2, tile_tokens=8)
@example(num_experts=4, ids=[], top_k=2, tile_tokens=8)
def test_every_slot_has_its_place(num_experts: int, ids: list[int], top_k: int, tile_tokens: int) -> None:
    whole = ids[: len(ids) // top_k * top_k]
    for dtype in (torch.int32, torch.int64):
        check_tiles(torch.tensor(whole, dtype=dtype).view(-1, top_k), num_experts, tile_tokens)


def test_the_worst_routing_fits_exactly() -> None:
    # Every expert gets one slot more than fills its tiles.
    ids = torch.cat([torch.arange(4)] * 9).view(-1, 1)
    assert max_tiles(36, 4, 8) == 8
    assert bool((expert_tiles(ids, 4, 8).experts >= 0).all())
