"""Hessians on a GPU: tensor-core products of BF16 tokens, float32 sums, one tile of one expert a program."""

# Triton compiles these from the types it is called with.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from memopt.errors import UsageError
from memopt.kernels.device.current_device import on_tensors_device
from memopt.kernels.device.triton_math import matmul
from memopt.kernels.layout import HESSIAN_CHUNK_TOKENS


@dataclass(frozen=True)
class HessianTiles:
    """A program's tile of the Hessian, `rows` x `columns`, and how many tokens it multiplies at a time."""

    rows: int
    columns: int
    tokens: int
    num_warps: int
    num_stages: int


# 128 x 256: 85 FLOPs a loaded byte. 128 x 128 has 64, which at 0.6 of the BF16 rate is more than Hopper's L2 delivers.
CUDA_TILES = HessianTiles(rows=128, columns=256, tokens=64, num_warps=8, num_stages=4)
# 64 KiB of local memory.
HIP_TILES = HessianTiles(rows=128, columns=128, tokens=64, num_warps=8, num_stages=2)


@triton.jit
def _add_tile(matrix, sums, size, first_row, first_column, is_diagonal):
    """Adds `sums` to the tile of `matrix` [size, size] that starts there, and writes the mirror image of the result.

    The square on the diagonal has no mirror image: its programs compute it whole.
    """
    row, column = tl.arange(0, sums.shape[0]), tl.arange(0, sums.shape[1])
    # Offsets within a tile fit 32 bits, offsets of a tile do not.
    tile = matrix + first_row.to(tl.int64) * size + first_column
    offsets = row[:, None] * size + column[None, :]
    inside = (first_row + row[:, None] < size) & (first_column + column[None, :] < size)
    total = tl.load(tile + offsets, mask=inside, other=0.0) + sums
    tl.store(tile + offsets, total, mask=inside)
    if not is_diagonal:
        mirror = matrix + first_column.to(tl.int64) * size + first_row
        mirror_offsets = column[:, None] * size + row[None, :]
        mirror_inside = (first_column + column[:, None] < size) & (first_row + row[None, :] < size)
        tl.store(mirror + mirror_offsets, tl.trans(total), mask=mirror_inside)


@triton.jit
def hessian_kernel(
    hessian,
    tokens,
    expert_offsets,
    size,
    first_position,
    CHUNK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """One chunk, from `first_position` of an expert's tokens on, into one tile of its Hessian and its mirror image.

    Tiles wholly below the diagonal are left to their mirror images.
    """
    row_block, column_block = tl.program_id(0), tl.program_id(1)
    expert = tl.program_id(2).to(tl.int64)
    first = tl.load(expert_offsets + expert) + first_position
    num_tokens = tl.minimum(tl.load(expert_offsets + expert + 1) - first, CHUNK_TOKENS).to(tl.int32)
    if (num_tokens <= 0) | (row_block * BLOCK_ROWS >= (column_block + 1) * BLOCK_COLUMNS):
        return
    # A size of 1 is a constant, without a type.
    wide_size = tl.cast(size, tl.int64)
    row, column, token = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_COLUMNS), tl.arange(0, BLOCK_TOKENS)
    # How many rows and columns of the Hessian this tile holds.
    num_rows, num_columns = size - row_block * BLOCK_ROWS, size - column_block * BLOCK_COLUMNS
    left = tokens + first * wide_size + row_block * BLOCK_ROWS + (token[:, None] * size + row[None, :])
    right = tokens + first * wide_size + column_block * BLOCK_COLUMNS + (token[:, None] * size + column[None, :])
    acc = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    for position in range(0, num_tokens, BLOCK_TOKENS):
        live = token[:, None] < num_tokens - position
        a = tl.load(left, mask=live & (row[None, :] < num_rows), other=0.0)
        b = tl.load(right, mask=live & (column[None, :] < num_columns), other=0.0)
        acc = matmul(tl.trans(a), b, acc)
        left += BLOCK_TOKENS * size
        right += BLOCK_TOKENS * size
    # Half a tile at a time: the sums, their old values and the addresses of a whole one do not fit the registers.
    halves = acc.reshape(BLOCK_ROWS, 2, BLOCK_COLUMNS // 2).permute(0, 2, 1)
    low, high = halves.split()
    matrix = hessian + expert * wide_size * wide_size
    is_diagonal = (row_block + 1) * BLOCK_ROWS > column_block * BLOCK_COLUMNS
    first_row, first_column = row_block * BLOCK_ROWS, column_block * BLOCK_COLUMNS
    _add_tile(matrix, low, size, first_row, first_column, is_diagonal)
    _add_tile(matrix, high, size, first_row, first_column + BLOCK_COLUMNS // 2, is_diagonal)


@on_tensors_device
def accumulate_hessian_triton(
    hessian: Tensor,
    tokens: Tensor,
    expert_offsets: Tensor,
    *,
    chunk_tokens: int = HESSIAN_CHUNK_TOKENS,
    tiles: HessianTiles | None = None,
) -> None:
    """hessian[e] += X_e^T X_e in place, as `accumulate_hessian` has it; same arguments as the reference.

    `tiles`: CUDA_TILES or HIP_TILES unless given. A program owns its tile and its mirror image: no atomics, no order
    that depends on timing. Raises UsageError for a chunk that blocks of tokens do not fill.
    """
    if tiles is None:
        tiles = HIP_TILES if torch.version.hip else CUDA_TILES
    if chunk_tokens % tiles.tokens or tiles.columns % tiles.rows:
        raise UsageError(
            f"chunks of {chunk_tokens} tokens, blocks of {tiles.tokens}, tiles of {tiles.rows} x {tiles.columns}",
            remedy="chunks must be a multiple of the blocks, and a tile's columns of its rows",
        )
    num_experts, size, _ = hessian.shape
    if num_experts == 0 or size == 0:
        return
    grid = (triton.cdiv(size, tiles.rows), triton.cdiv(size, tiles.columns), num_experts)
    # One launch a chunk: a loop over chunks in the kernel would keep the addresses of the whole tile and spill them.
    for first_position in range(0, int(expert_offsets.diff().max()), chunk_tokens):
        hessian_kernel[grid](
            hessian,
            tokens,
            expert_offsets,
            size,
            first_position,
            CHUNK_TOKENS=chunk_tokens,
            BLOCK_ROWS=tiles.rows,
            BLOCK_COLUMNS=tiles.columns,
            BLOCK_TOKENS=tiles.tokens,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            enable_fp_fusion=False,
        )
