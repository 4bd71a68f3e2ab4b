"""Steps that the decode kernels share: query operands, tiles of a split, online softmax, results.

Scores and accumulators are transposed: tokens (or value elements) are rows, heads are columns, so that the few heads of
a rank fill the narrow side of a tensor-core instruction (docs/kernels/attention.md).
"""

# Triton compiles these from the types it is called with.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from memopt.kernels.device.triton_math import INTERPRETED, e4m3_bits_to_f32, to_bf16
from memopt.kernels.layout import F32_EXPONENT_BIAS, F32_MANTISSA_BITS

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Exponent field that the largest |query| of a head is brought to: 2**14 .. 2**15, below float16's 65504.
TOP_EXPONENT = tl.constexpr(14)
# Probabilities are kept times 2**14: below 65504 also where fp8_ds_mla doubles them, and 14 binades further from
# float16's underflow, which many small ones reach together (a long context, or one token with a much larger scale).
WEIGHT_EXPONENT = tl.constexpr(14)
# The running maximum before the first token, the lowest finite float32: where a tile has no token, -inf - -inf would be
# NaN.
NO_MAXIMUM = tl.constexpr((2.0**-F32_MANTISSA_BITS - 2.0) * 2.0**F32_EXPONENT_BIAS)
BIAS = tl.constexpr(F32_EXPONENT_BIAS)
MANTISSA_BITS = tl.constexpr(F32_MANTISSA_BITS)


@triton.jit
def e4m3_to_f16(bits):
    """float16 of e4m3fn bytes (uint8), exact, NaN included: one conversion instruction for two when compiled."""
    if INTERPRETED:
        return e4m3_bits_to_f32(bits).to(tl.float16)
    else:
        return bits.to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def query_powers(largest):
    """Powers of two (up, down) float32 [H], up * down = 1: `up` brings a head's largest |query| to 2**14 .. 2**15."""
    exponent = (largest.to(tl.uint32, bitcast=True) >> MANTISSA_BITS).to(tl.int32)
    exponent = tl.maximum(exponent, TOP_EXPONENT + 1)
    up = (-exponent + (2 * BIAS + TOP_EXPONENT)) << MANTISSA_BITS
    down = (exponent - TOP_EXPONENT) << MANTISSA_BITS
    return up.to(tl.float32, bitcast=True), down.to(tl.float32, bitcast=True)


@triton.jit
def load_columns(rows, index, in_range, SIZE: tl.constexpr, OFFSET: tl.constexpr, WIDTH: tl.constexpr):
    """float32 [WIDTH, H]: columns OFFSET .. OFFSET + WIDTH of rows `index` [H] of a matrix [., SIZE], as columns.

    Zero where not `in_range` [H].
    """
    place = rows + index[None, :] * SIZE + OFFSET + tl.arange(0, WIDTH)[:, None]
    return tl.load(place, mask=in_range[None, :], other=0.0).to(tl.float32)


@triton.jit
def split_tiles(num_tokens, split, num_splits, TILE: tl.constexpr, BOUNDARY: tl.constexpr):
    """Tiles (first, last) of one split: splits are equal runs of `BOUNDARY` tokens, whatever the tile."""
    length = tl.cdiv(tl.cdiv(num_tokens, BOUNDARY), num_splits) * (BOUNDARY // TILE)
    first = split * length
    return first, tl.minimum(first + length, tl.cdiv(num_tokens, TILE))


@triton.jit
def softmax_step(scores, maximum, total):
    """One tile of the online softmax, in powers of two.

    `scores` float32 [TILE, H], -inf where a token does not count; `maximum` (NO_MAXIMUM at first), `total` float32 [H]
    so far. Returns probabilities relative to the new maximum, times 2**WEIGHT_EXPONENT, the factor for what was summed
    before, the new maximum, the new total of the probabilities.
    """
    new_maximum = tl.maximum(maximum, tl.max(scores, 0))
    factor = tl.exp2(maximum - new_maximum)
    probability = tl.exp2(scores - (new_maximum - WEIGHT_EXPONENT)[None, :])
    return probability, factor, new_maximum, total * factor + tl.sum(probability, 0)


@triton.jit
def store_columns(rows, index, in_range, value, SIZE: tl.constexpr, OFFSET: tl.constexpr, WIDTH: tl.constexpr):
    """Writes float32 `value` [WIDTH, H] as columns OFFSET.. of rows `index` [H] of a matrix [., SIZE]."""
    place = rows + index[None, :] * SIZE + OFFSET + tl.arange(0, WIDTH)[:, None]
    if rows.dtype.element_ty == tl.bfloat16:
        tl.store(place, to_bf16(value), mask=in_range[None, :])
    else:
        tl.store(place, value, mask=in_range[None, :])


@triton.jit
def log_sum_exp(maximum, total):
    """Natural logarithm of sum(exp(score)), float32 [H]; -inf when nothing was summed."""
    return tl.where(total == 0.0, float("-inf"), (maximum + tl.log2(tl.where(total == 0.0, 1.0, total))) * LN_2)


@triton.jit
def reciprocal(total):
    """1 / total, and 0 for a split without tokens."""
    return tl.where(total == 0.0, 0.0, 1.0 / tl.where(total == 0.0, 1.0, total))
