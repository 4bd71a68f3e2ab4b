"""Sorts the tokens of a mixture-of-experts layer by expert, in tiles of one expert each, without a word to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NO_EXPERT = -1


@dataclass(frozen=True)
class ExpertTiles:
    """Slots by expert. A slot is one (token, choice) pair: token * top_k + choice, S of them in all.

    `slots`: int32 [num_tiles * tile_tokens]; a tile holds slots of one expert, in rising order, then padding (S).
    `experts`: int32 [num_tiles], the tile's expert, NO_EXPERT for a tile that is not used. Tiles are in the order of
    their experts, unused ones last. `num_tiles` is an upper bound known without reading the device.
    """

    slots: Tensor
    experts: Tensor
    num_tiles: int
    tile_tokens: int


def max_tiles(num_slots: int, num_experts: int, tile_tokens: int) -> int:
    """Most tiles that `num_slots` slots can need: every expert with a slot wastes at most tile_tokens - 1 places."""
    touched = min(num_slots, num_experts)
    return min(num_slots, (num_slots + touched * (tile_tokens - 1)) // tile_tokens)


def expert_tiles(expert_ids: Tensor, num_experts: int, tile_tokens: int) -> ExpertTiles:
    """Tiles of the slots of `expert_ids` int32 or int64 [T, top_k], on its device; checked by `moe_gemm`.

    An id outside 0..num_experts - 1 is an expert of another rank: its slot is in no tile. Deterministic: equal ids
    always give equal tiles.
    """
    device, num_slots = expert_ids.device, expert_ids.numel()
    num_tiles = max_tiles(num_slots, num_experts, tile_tokens)
    flat = expert_ids.reshape(-1).to(torch.int64)
    key = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    key, order = torch.sort(key, stable=True)
    starts = torch.searchsorted(key, torch.arange(num_experts + 1, device=device))
    ends = torch.cumsum((starts[1:] - starts[:-1] + tile_tokens - 1) // tile_tokens, 0)
    # Place of each sorted slot: its rank among its expert's, from the expert's first tile on; the others' go to a place
    # behind the last tile, which is cut off.
    first_tile = torch.nn.functional.pad(ends, (1, 0))
    place = first_tile[key] * tile_tokens + torch.arange(num_slots, device=device) - starts[key]
    place = torch.where(key < num_experts, place, num_tiles * tile_tokens)
    slots = torch.full((num_tiles * tile_tokens + 1,), num_slots, dtype=torch.int32, device=device)
    slots[place] = order.to(torch.int32)
    tile_experts = torch.searchsorted(ends, torch.arange(num_tiles, device=device), right=True)
    tile_experts = torch.where(tile_experts < num_experts, tile_experts, NO_EXPERT)
    return ExpertTiles(slots[:-1], tile_experts.to(torch.int32), num_tiles, tile_tokens)
