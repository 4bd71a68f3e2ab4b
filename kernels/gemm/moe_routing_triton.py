"""The sorting of slots by expert as one launch of one program, for the few slots of decode.

In plain torch it takes some twenty launches, which together last longer than the experts' products at small batches.
"""

# Triton compiles these from the types it is called with.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from memopt.kernels.device.current_device import on_tensors_device
from memopt.kernels.gemm.moe_routing import NO_EXPERT, ExpertTiles, expert_tiles, max_tiles

MOST_SLOTS = 1024
NUM_WARPS = 8
# Pairs of slots that are compared at once: twice as many spill on gfx942.
PAIRS_A_STEP = 1 << 13
MIN_SIZE = 16
_NO_EXPERT = tl.constexpr(NO_EXPERT)


# Change from step to step: one compiled variant serves them all.
@triton.jit(do_not_specialize=["num_slots", "num_tiles"])
def expert_tiles_kernel(
    expert_ids, slots, experts, num_slots, num_experts, num_tiles,
    SLOTS: tl.constexpr, BINS: tl.constexpr, TILE_TOKENS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One program. SLOTS >= num_slots and BINS > num_experts are powers of two; BINS is the key of "no expert here"."""
    slot = tl.arange(0, SLOTS)
    key = tl.load(expert_ids + slot, mask=slot < num_slots, other=_NO_EXPERT).to(tl.int32)
    key = tl.where((key >= 0) & (key < num_experts), key, num_experts)
    expert = tl.arange(0, BINS)
    counts = tl.where(expert < num_experts, tl.histogram(key, BINS), 0)
    tiles = (counts + TILE_TOKENS - 1) // TILE_TOKENS
    first_tile = tl.cumsum(tiles, 0) - tiles

    rank = tl.zeros([SLOTS], tl.int32)
    for start in range(0, SLOTS, STEP):
        other = start + tl.arange(0, STEP)
        other_key = tl.load(expert_ids + other, mask=other < num_slots, other=_NO_EXPERT).to(tl.int32)
        is_before = (key[:, None] == other_key[None, :]) & (other[None, :] < slot[:, None])
        rank += tl.sum(is_before.to(tl.int32), 1)

    # Everything is padding at first; the barrier keeps the two stores to a place in order.
    for start in range(0, num_tiles * TILE_TOKENS, SLOTS):
        place = start + slot
        tl.store(slots + place, tl.zeros([SLOTS], tl.int32) + num_slots, mask=place < num_tiles * TILE_TOKENS)
        tl.store(experts + place, tl.zeros([SLOTS], tl.int32) + _NO_EXPERT, mask=place < num_tiles)
    tl.debug_barrier()
    tl.store(slots + tl.gather(first_tile, key, 0) * TILE_TOKENS + rank, slot, mask=key < num_experts)
    for index in range(0, tl.max(tiles, 0)):
        tl.store(experts + first_tile + index, expert, mask=index < tiles)


@on_tensors_device
def expert_tiles_triton(expert_ids: Tensor, num_experts: int, tile_tokens: int) -> ExpertTiles:
    """The same tiles as `expert_tiles`, which documents them; more than MOST_SLOTS slots are sorted by it."""
    num_slots = expert_ids.numel()
    if num_slots > MOST_SLOTS:
        return expert_tiles(expert_ids, num_experts, tile_tokens)
    num_tiles = max_tiles(num_slots, num_experts, tile_tokens)
    slots = torch.empty(num_tiles * tile_tokens, dtype=torch.int32, device=expert_ids.device)
    experts = torch.empty(num_tiles, dtype=torch.int32, device=expert_ids.device)
    size = max(triton.next_power_of_2(num_slots), MIN_SIZE)
    expert_tiles_kernel[(1,)](
        expert_ids, slots, experts, num_slots, num_experts, num_tiles,
        SLOTS=size, BINS=triton.next_power_of_2(num_experts + 1), TILE_TOKENS=tile_tokens,
        STEP=min(size, PAIRS_A_STEP // size), num_warps=NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return ExpertTiles(slots, experts, num_tiles, tile_tokens)
