"""What the INT4 GEMM kernels share: unpacking of planar words and the product with one block of 256 codes.

Weights are the left operand (rows of the weight are rows of the product), tokens the right one: a warp then needs the
fewest scales and matrix instructions. With two warps a CTA Triton uses mma.m16n8k16 on every NVIDIA target.
"""

# Triton compiles these from the types it is called with.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from memopt.kernels.device.capability import has_capability
from memopt.kernels.device.triton_math import bf16_bits_to_f32, matmul, to_bf16
from memopt.kernels.layout import (
    BF16_128_BITS,
    BF16_136_BITS,
    BF16_BITS,
    CODES_PER_WORD,
    EACH_HALF,
    INT4_BITS,
    INT4_CODE_MASK,
    INT4_CODE_OFFSET,
    PLANAR_BLOCK_CODES,
    PLANAR_BLOCK_WORDS,
    PLANAR_SCALES_PER_WORD,
)

BLOCK_CODES = tl.constexpr(PLANAR_BLOCK_CODES)
BLOCK_WORDS = tl.constexpr(PLANAR_BLOCK_WORDS)
SCALES_PER_WORD = tl.constexpr(PLANAR_SCALES_PER_WORD)
_PLANES = tl.constexpr(CODES_PER_WORD)
_NIBBLE_BITS = tl.constexpr(INT4_BITS)
_NIBBLE_MASK = tl.constexpr(INT4_CODE_MASK)
_CODE_OFFSET = tl.constexpr(INT4_CODE_OFFSET)
_HALF_BITS = tl.constexpr(BF16_BITS)

# Rows of a weight and warps of a CTA, for every kernel of this package.
TILE_ROWS = 64
NUM_WARPS = 2
# Tokens of a tile: one column of mma.m16n8k16 tiles, or two.
FEW_TOKENS = 8
MOST_TOKENS = 16
# The first compute capability whose PTX has sub.bf16x2 (PTX ISA, "sub": ptxas refuses it for sm_89 and before).
ASSEMBLY_CAPABILITY = (9, 0)


def unpack_assembly(plane: int) -> str:
    """PTX that turns nibble `plane` of two words ($1, $2) into two BF16 codes (low and high half of $0).

    prmt puts the half words with the nibble side by side, lop3 (a & b | c) cuts both nibbles out and sets them under
    the exponent of 128.0, and one packed subtraction of 136.0 leaves the codes, exact. All planes together are 24
    instructions for 16 weights: ptxas makes one prmt of four equal ones.
    """
    shift = INT4_BITS * plane % BF16_BITS
    half = "0x5410" if plane < CODES_PER_WORD // PLANAR_SCALES_PER_WORD else "0x7632"
    return "\n".join(
        (
            "{ .reg .b32 pair, offset;",
            f"prmt.b32 pair, $1, $2, {half};",
            f"shr.b32 pair, pair, {shift};",
            f"lop3.b32 pair, pair, {EACH_HALF * INT4_CODE_MASK:#010x}, {EACH_HALF * BF16_128_BITS:#010x}, 0xea;",
            f"mov.b32 offset, {EACH_HALF * BF16_136_BITS:#010x};",
            "sub.bf16x2 $0, pair, offset; }",
        )
    )


_UNPACK_ASSEMBLY = tl.constexpr(tuple(unpack_assembly(plane) for plane in range(CODES_PER_WORD)))


@triton.jit
def unpack_plane(words, PLANE: tl.constexpr, USE_ASSEMBLY: tl.constexpr):
    """BF16 codes -8..7 of nibble PLANE of planar `words` (int32, any shape)."""
    if USE_ASSEMBLY:
        return tl.inline_asm_elementwise(
            _UNPACK_ASSEMBLY[PLANE], "=r,r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        nibbles = (words >> (_NIBBLE_BITS * PLANE)) & _NIBBLE_MASK
        return to_bf16((nibbles - _CODE_OFFSET).to(tl.float32))


@triton.jit
def low_scale(word):
    """float32 of the BF16 scale in the low half of int32 `word`."""
    return bf16_bits_to_f32(word.to(tl.int16))


@triton.jit
def high_scale(word):
    """float32 of the BF16 scale in the high half of int32 `word`."""
    return bf16_bits_to_f32((word >> _HALF_BITS).to(tl.int16))


@triton.jit
def load_tokens(token_ptrs, token_mask, column, num_columns, PLANE: tl.constexpr, HAS_TAIL: tl.constexpr):
    """x [32, tokens] under nibble PLANE of the block whose first column is `column`; 0 past `num_columns`."""
    if HAS_TAIL:
        inside = (column + PLANE * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)) < num_columns
        return tl.load(token_ptrs + PLANE * BLOCK_WORDS, mask=token_mask[None, :] & inside[:, None], other=0.0)
    else:
        return tl.load(token_ptrs + PLANE * BLOCK_WORDS, mask=token_mask[None, :], other=0.0)


@triton.jit
def planes_product(
    acc, words, token_ptrs, token_mask, column, num_columns,
    FIRST: tl.constexpr, COUNT: tl.constexpr, HAS_TAIL: tl.constexpr, USE_ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """acc [rows, tokens] + codes times x over COUNT nibbles of `words` [rows, 32] from nibble FIRST, without scales."""
    for index in tl.static_range(COUNT):
        x = load_tokens(token_ptrs, token_mask, column, num_columns, FIRST + index, HAS_TAIL)
        acc = matmul(unpack_plane(words, FIRST + index, USE_ASSEMBLY), x, acc)
    return acc


@triton.jit
def block_product(
    acc, words, scale_ptrs, scale_stride, row_mask, token_ptrs, token_mask, column, num_columns,
    GROUP_SIZE: tl.constexpr, HAS_TAIL: tl.constexpr, USE_ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """acc [rows, tokens] + the product of one block: planar `words` [rows, 32] and x [256, tokens], scaled by group.

    `scale_ptrs` [rows] is at the block's first scale word, the next one `scale_stride` further. GROUP_SIZE 0: the
    whole row has one scale, which the caller applies at the end.
    """
    if GROUP_SIZE == 0:
        acc = planes_product(
            acc, words, token_ptrs, token_mask, column, num_columns, 0, _PLANES, HAS_TAIL, USE_ASSEMBLY
        )
    else:
        planes: tl.constexpr = GROUP_SIZE // BLOCK_WORDS
        for pair in tl.static_range(BLOCK_CODES // (GROUP_SIZE * SCALES_PER_WORD)):
            scale_word = tl.load(scale_ptrs + pair * scale_stride, mask=row_mask, other=0)
            for half in tl.static_range(SCALES_PER_WORD):
                partial = planes_product(
                    tl.zeros(acc.shape, tl.float32), words, token_ptrs, token_mask, column, num_columns,
                    (pair * SCALES_PER_WORD + half) * planes, planes, HAS_TAIL, USE_ASSEMBLY,
                )  # fmt: skip
                acc = tl.fma(partial, (low_scale(scale_word) if half == 0 else high_scale(scale_word))[:, None], acc)
    return acc


@triton.jit
def rows_product(
    acc, word_ptrs, word_stride, scale_ptrs, scale_stride, row_mask, token_ptrs, token_mask,
    first_block, num_blocks, num_columns,
    GROUP_SIZE: tl.constexpr, HAS_TAIL: tl.constexpr, USE_ASSEMBLY: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """acc [rows, tokens] + the product over `num_blocks` blocks from `first_block`, whose pointers are given.

    `word_ptrs` [rows, 32] advance by `word_stride` a block, `token_ptrs` [32, tokens] by 256 elements.
    """
    scale_words: tl.constexpr = 0 if GROUP_SIZE == 0 else BLOCK_CODES // (GROUP_SIZE * SCALES_PER_WORD)
    for block in tl.range(0, num_blocks, num_stages=STAGES):
        words = tl.load(word_ptrs, mask=row_mask[:, None], other=0)
        column = (first_block + block) * BLOCK_CODES
        acc = block_product(
            acc, words, scale_ptrs, scale_stride, row_mask, token_ptrs, token_mask, column, num_columns,
            GROUP_SIZE, HAS_TAIL, USE_ASSEMBLY,
        )  # fmt: skip
        word_ptrs += word_stride
        scale_ptrs += scale_words * scale_stride
        token_ptrs += BLOCK_CODES
    return acc


def tile_tokens(num_tokens: int) -> int:
    """Tokens of a tile: 8 when that holds them all on NVIDIA, else 16. A token's result is the same in both."""
    return FEW_TOKENS if num_tokens <= FEW_TOKENS and not torch.version.hip else MOST_TOKENS


def uses_assembly(device: torch.device) -> bool:
    """Whether words are unpacked by PTX: from ASSEMBLY_CAPABILITY on; not interpreted, not AMD."""
    return has_capability(device, ASSEMBLY_CAPABILITY)


def num_stages(tokens: int) -> int:
    """Pipeline depth for tiles of `tokens`: the deepest that compiles without a spill on sm_90 and sm_100."""
    return 5 if tokens == FEW_TOKENS else 3
