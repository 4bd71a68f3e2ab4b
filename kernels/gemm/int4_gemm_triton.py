"""INT4 x BF16 GEMM for few tokens on the GPU: tiles of 64 rows, K split over CTAs where there are too few of them.

A token's result depends neither on the other tokens nor on their number: K is split by the weight's shape alone, and
the parts are added in a fixed order by a second kernel.
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
from memopt.kernels.gemm.planar import PlanarWeight
from memopt.kernels.gemm.planar_triton import (
    BLOCK_CODES,
    BLOCK_WORDS,
    NUM_WARPS,
    SCALES_PER_WORD,
    TILE_ROWS,
    low_scale,
    num_stages,
    rows_product,
    tile_tokens,
    uses_assembly,
)
from memopt.kernels.layout import PLANAR_BLOCK_CODES

# CTAs that fill a large GPU (132 SMs of an H200, at least two each). A constant, so that results do not depend on the
# device; a CTA is left at least two blocks of K, or it would spend its time starting.
ENOUGH_CTAS = 288
MIN_SPLIT_BLOCKS = 2
# Bounds the float32 parts of a split product.
MOST_TOKENS_A_LAUNCH = 256
SUM_TILE = 512


# Changes from step to step: one compiled variant serves every number of tokens of a tile.
@triton.jit(do_not_specialize=["num_tokens"])
def int4_gemm_kernel(
    x, words, scales, out, num_tokens, num_rows, num_columns, num_blocks, split_blocks,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, GROUP_SIZE: tl.constexpr, HAS_TAIL: tl.constexpr,
    IS_SPLIT: tl.constexpr, USE_ASSEMBLY: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, splits of K, token tiles). `out`: BF16 [M, N], or float32 [splits, M, N] when IS_SPLIT."""
    split = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    row_mask, token_mask = row < num_rows, token < num_tokens
    word, first_block = tl.arange(0, BLOCK_WORDS), split * split_blocks
    scale_words: tl.constexpr = 0 if GROUP_SIZE == 0 else BLOCK_CODES // (GROUP_SIZE * SCALES_PER_WORD)
    scale_ptrs = scales + first_block.to(tl.int64) * scale_words * num_rows + row
    acc = rows_product(
        tl.zeros([ROWS, TOKENS], tl.float32),
        words + (first_block.to(tl.int64) * num_rows + row[:, None]) * BLOCK_WORDS + word[None, :],
        num_rows * BLOCK_WORDS, scale_ptrs, num_rows, row_mask,
        x + token[None, :].to(tl.int64) * num_columns + first_block * BLOCK_CODES + word[:, None], token_mask,
        first_block, tl.minimum(split_blocks, num_blocks - first_block), num_columns,
        GROUP_SIZE, HAS_TAIL, USE_ASSEMBLY, STAGES,
    )  # fmt: skip
    if GROUP_SIZE == 0:
        acc = acc * low_scale(tl.load(scales + row, mask=row_mask, other=0))[:, None]
    out_mask = row_mask[:, None] & token_mask[None, :]
    if IS_SPLIT:
        place = (split * num_tokens + token[None, :]).to(tl.int64) * num_rows + row[:, None]
        tl.store(out + place, acc, mask=out_mask)
    else:
        tl.store(out + token[None, :].to(tl.int64) * num_rows + row[:, None], to_bf16(acc), mask=out_mask)


@triton.jit
def sum_splits_kernel(partial, out, num_values, num_splits, TILE: tl.constexpr):
    """BF16 out [num_values] = the sum of float32 partial [num_splits, num_values], added in order."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = at < num_values
    total = tl.zeros([TILE], tl.float32)
    part_ptrs = partial + at
    for _ in range(num_splits):
        total += tl.load(part_ptrs, mask=mask, other=0.0)
        part_ptrs += num_values
    tl.store(out + at, to_bf16(total), mask=mask)


def blocks_per_split(num_rows: int, num_blocks: int) -> int:
    """Blocks of K that one CTA sums: all, unless the row tiles alone leave the device idle. By the weight alone."""
    row_tiles = triton.cdiv(num_rows, TILE_ROWS)
    wanted = triton.cdiv(ENOUGH_CTAS, row_tiles)
    return max(min(MIN_SPLIT_BLOCKS, num_blocks), triton.cdiv(num_blocks, wanted))


def int4_gemm_triton(x: Tensor, weight: PlanarWeight, out: Tensor) -> Tensor:
    """out BF16 [M, N] = x BF16 [M, K] @ weight.T, float32 sums; checked by `int4_gemm`, which documents it."""
    for first in range(0, x.shape[0], MOST_TOKENS_A_LAUNCH):
        _launch(x[first : first + MOST_TOKENS_A_LAUNCH], weight, out[first : first + MOST_TOKENS_A_LAUNCH])
    return out


@on_tensors_device
def _launch(x: Tensor, weight: PlanarWeight, out: Tensor) -> None:
    num_tokens, num_rows = out.shape
    tokens = tile_tokens(num_tokens)
    split_blocks = blocks_per_split(num_rows, weight.num_blocks)
    splits = triton.cdiv(weight.num_blocks, split_blocks)
    target = out
    if splits > 1:
        target = torch.empty(splits, num_tokens, num_rows, dtype=torch.float32, device=x.device)
    int4_gemm_kernel[(triton.cdiv(num_rows, TILE_ROWS), splits, triton.cdiv(num_tokens, tokens))](
        x, weight.words, weight.scales, target,
        num_tokens, num_rows, weight.num_columns, weight.num_blocks, split_blocks,
        TOKENS=tokens, ROWS=TILE_ROWS, GROUP_SIZE=weight.group_size or 0,
        HAS_TAIL=weight.num_columns % PLANAR_BLOCK_CODES != 0, IS_SPLIT=splits > 1,
        USE_ASSEMBLY=uses_assembly(x.device), STAGES=num_stages(tokens),
        num_warps=NUM_WARPS, num_stages=num_stages(tokens), enable_fp_fusion=False,
    )  # fmt: skip
    if splits > 1:
        sum_splits_kernel[(triton.cdiv(out.numel(), SUM_TILE),)](
            target, out, out.numel(), splits, TILE=SUM_TILE, num_warps=NUM_WARPS, enable_fp_fusion=False
        )
