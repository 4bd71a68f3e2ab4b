"""The experts of a mixture-of-experts layer on the GPU: four launches, every sum in a fixed order.

1. slots sorted by expert (moe_routing_triton.py);
2. gate and up of a tile of tokens and 32 hidden values, with silu(gate) * up in registers (BF16 [S, I]);
3. down, float32 [S, H] a slot; where one block of 256 codes holds all of I, a CTA goes over several row tiles;
4. the weighted sum over a token's choices, in their order.
"""

# Triton compiles these from the types it is called with.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from memopt.kernels.device.current_device import on_tensors_device
from memopt.kernels.device.triton_math import to_bf16
from memopt.kernels.gemm.moe_routing_triton import expert_tiles_triton
from memopt.kernels.gemm.planar import PlanarWeight
from memopt.kernels.gemm.planar_triton import (
    BLOCK_WORDS,
    NUM_WARPS,
    TILE_ROWS,
    block_product,
    low_scale,
    num_stages,
    rows_product,
    tile_tokens,
    uses_assembly,
)
from memopt.kernels.layout import PLANAR_BLOCK_CODES

# Row tiles that a CTA of the down projection goes over when K is one block: 4 x 9 KiB hide its start.
DOWN_TILES = 4
# Tokens for an expert, on average, from which tiles of 16 are used.
MANY_TOKENS_AN_EXPERT = 4
SUM_TILE = 512
# Bounds the float32 choices of a launch, and the tiles along the second axis of its grid (a GPU takes 65,535 there).
MOST_SLOTS_A_LAUNCH = 1 << 15


# Changes from step to step: one compiled variant serves every number of slots.
@triton.jit(do_not_specialize=["num_slots"])
def moe_gate_up_kernel(
    x, words, scales, tile_slots, tile_experts, hidden,
    num_slots, top_k, hidden_size, num_columns, num_blocks, num_scale_words,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, GROUP_SIZE: tl.constexpr, HAS_TAIL: tl.constexpr,
    USE_ASSEMBLY: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of ROWS / 2 hidden values, token tiles). A tile's rows: ROWS / 2 of the gate, the same of up."""
    half: tl.constexpr = ROWS // 2
    expert = tl.load(tile_experts + tl.program_id(1))
    if expert < 0:
        return
    lane = tl.arange(0, ROWS)
    value = tl.program_id(0) * half + lane % half
    row = value + (lane // half) * hidden_size
    row_mask = value < hidden_size
    slot = tl.load(tile_slots + tl.program_id(1) * TOKENS + tl.arange(0, TOKENS))
    token_mask = slot < num_slots
    word, num_rows = tl.arange(0, BLOCK_WORDS), 2 * hidden_size
    scale_ptrs = scales + expert.to(tl.int64) * num_scale_words * num_rows + row
    acc = rows_product(
        tl.zeros([ROWS, TOKENS], tl.float32),
        words + (expert.to(tl.int64) * num_blocks * num_rows + row[:, None]) * BLOCK_WORDS + word[None, :],
        num_rows * BLOCK_WORDS, scale_ptrs, num_rows, row_mask,
        x + (slot // top_k)[None, :].to(tl.int64) * num_columns + word[:, None], token_mask,
        0, num_blocks, num_columns,
        GROUP_SIZE, HAS_TAIL, USE_ASSEMBLY, STAGES,
    )  # fmt: skip
    if GROUP_SIZE == 0:
        acc = acc * low_scale(tl.load(scale_ptrs, mask=row_mask, other=0))[:, None]
    gate, up = tl.split(tl.permute(tl.reshape(acc, [2, half, TOKENS]), [1, 2, 0]))
    result = gate / (1.0 + tl.exp(-gate)) * up
    value = tl.program_id(0) * half + tl.arange(0, half)
    mask = (value < hidden_size)[:, None] & token_mask[None, :]
    tl.store(hidden + slot[None, :].to(tl.int64) * hidden_size + value[:, None], to_bf16(result), mask=mask)


@triton.jit(do_not_specialize=["num_slots"])
def moe_down_kernel(
    hidden, words, scales, tile_slots, tile_experts, choices,
    num_slots, num_rows, num_columns, num_blocks, num_scale_words,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, ROW_TILES: tl.constexpr, GROUP_SIZE: tl.constexpr,
    HAS_TAIL: tl.constexpr, USE_ASSEMBLY: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (runs of ROW_TILES row tiles, token tiles). ROW_TILES > 1 only if K is one block."""
    expert = tl.load(tile_experts + tl.program_id(1))
    if expert < 0:
        return
    slot = tl.load(tile_slots + tl.program_id(1) * TOKENS + tl.arange(0, TOKENS))
    token_mask = slot < num_slots
    word = tl.arange(0, BLOCK_WORDS)
    row = tl.program_id(0) * (ROWS * ROW_TILES) + tl.arange(0, ROWS)
    expert_words = words + expert.to(tl.int64) * num_blocks * num_rows * BLOCK_WORDS
    word_ptrs = expert_words + row[:, None] * BLOCK_WORDS + word[None, :]
    scale_ptrs = scales + expert.to(tl.int64) * num_scale_words * num_rows + row
    token_ptrs = hidden + slot[None, :].to(tl.int64) * num_columns + word[:, None]
    out_ptrs = choices + slot[None, :].to(tl.int64) * num_rows + row[:, None]
    if ROW_TILES == 1:
        row_mask = row < num_rows
        acc = rows_product(
            tl.zeros([ROWS, TOKENS], tl.float32), word_ptrs, num_rows * BLOCK_WORDS, scale_ptrs, num_rows, row_mask,
            token_ptrs, token_mask, 0, num_blocks, num_columns,
            GROUP_SIZE, HAS_TAIL, USE_ASSEMBLY, STAGES,
        )  # fmt: skip
        if GROUP_SIZE == 0:
            acc = acc * low_scale(tl.load(scale_ptrs, mask=row_mask, other=0))[:, None]
        tl.store(out_ptrs, acc, mask=row_mask[:, None] & token_mask[None, :])
    else:
        for _ in tl.range(0, ROW_TILES, num_stages=STAGES):
            row_mask = row < num_rows
            acc = block_product(
                tl.zeros([ROWS, TOKENS], tl.float32), tl.load(word_ptrs, mask=row_mask[:, None], other=0),
                scale_ptrs, num_rows, row_mask, token_ptrs, token_mask, 0, num_columns,
                GROUP_SIZE, HAS_TAIL, USE_ASSEMBLY,
            )  # fmt: skip
            if GROUP_SIZE == 0:
                acc = acc * low_scale(tl.load(scale_ptrs, mask=row_mask, other=0))[:, None]
            tl.store(out_ptrs, acc, mask=row_mask[:, None] & token_mask[None, :])
            row += ROWS
            word_ptrs += ROWS * BLOCK_WORDS
            scale_ptrs += ROWS
            out_ptrs += ROWS


@triton.jit
def moe_sum_kernel(
    choices, expert_ids, expert_weights, out, num_experts, num_rows, top_k, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of columns, tokens): out BF16 [T, H] = sum of weight * choices float32 [T, top_k, H], in order."""
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = column < num_rows
    total = tl.zeros([TILE], tl.float32)
    slot = token * top_k
    for _ in range(top_k):
        expert = tl.load(expert_ids + slot)
        product = tl.load(expert_weights + slot) * tl.load(choices + slot * num_rows + column, mask=mask, other=0.0)
        # The slot of an expert on another rank was never written: it may hold anything, NaN included.
        total += tl.where((expert >= 0) & (expert < num_experts), product, 0.0)
        slot += 1
    tl.store(out + token * num_rows + column, to_bf16(total), mask=mask)


def moe_tile_tokens(num_slots: int, num_experts: int) -> int:
    """Tokens of a tile: 8 while experts have few tokens each, 16 from there on."""
    return tile_tokens(1 if num_slots < MANY_TOKENS_AN_EXPERT * num_experts else num_slots)


def moe_gemm_triton(
    x: Tensor, gate_up: PlanarWeight, down: PlanarWeight, expert_ids: Tensor, expert_weights: Tensor, out: Tensor
) -> Tensor:
    """out BF16 [T, H]; checked by `moe_gemm`, which documents it."""
    num_tokens, top_k = expert_ids.shape
    if not top_k:
        return out.zero_()
    step = max(MOST_SLOTS_A_LAUNCH // top_k, 1)
    for first in range(0, num_tokens, step):
        part = slice(first, first + step)
        _launch(x[part], gate_up, down, expert_ids[part], expert_weights[part], out[part])
    return out


@on_tensors_device
def _launch(
    x: Tensor, gate_up: PlanarWeight, down: PlanarWeight, expert_ids: Tensor, expert_weights: Tensor, out: Tensor
) -> None:
    num_tokens, top_k = expert_ids.shape
    num_slots, num_experts = num_tokens * top_k, down.words.shape[0]
    hidden_size, num_rows = down.num_columns, down.num_rows
    tokens = moe_tile_tokens(num_slots, num_experts)
    tiles = expert_tiles_triton(expert_ids, num_experts, tokens)
    hidden = torch.empty(num_slots, hidden_size, dtype=torch.bfloat16, device=x.device)
    choices = torch.empty(num_slots, num_rows, dtype=torch.float32, device=x.device)
    options = {
        "TOKENS": tokens, "ROWS": TILE_ROWS, "USE_ASSEMBLY": uses_assembly(x.device), "STAGES": num_stages(tokens),
        "num_warps": NUM_WARPS, "num_stages": num_stages(tokens), "enable_fp_fusion": False,
    }  # fmt: skip
    moe_gate_up_kernel[(triton.cdiv(2 * hidden_size, TILE_ROWS), tiles.num_tiles)](
        x, gate_up.words, gate_up.scales, tiles.slots, tiles.experts, hidden,
        num_slots, top_k, hidden_size, gate_up.num_columns, gate_up.num_blocks, gate_up.scales.shape[1],
        GROUP_SIZE=gate_up.group_size or 0, HAS_TAIL=gate_up.num_columns % PLANAR_BLOCK_CODES != 0, **options,
    )  # fmt: skip
    row_tiles = DOWN_TILES if down.num_blocks == 1 else 1
    moe_down_kernel[(triton.cdiv(num_rows, TILE_ROWS * row_tiles), tiles.num_tiles)](
        hidden, down.words, down.scales, tiles.slots, tiles.experts, choices,
        num_slots, num_rows, hidden_size, down.num_blocks, down.scales.shape[1],
        GROUP_SIZE=down.group_size or 0, HAS_TAIL=hidden_size % PLANAR_BLOCK_CODES != 0, ROW_TILES=row_tiles,
        **options,
    )  # fmt: skip
    moe_sum_kernel[(triton.cdiv(num_rows, SUM_TILE), num_tokens)](
        choices, expert_ids, expert_weights, out, num_experts, num_rows, top_k,
        TILE=SUM_TILE, num_warps=NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
