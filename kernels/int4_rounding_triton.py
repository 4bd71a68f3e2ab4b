"""Steps of INT4 rounding on the GPU, shared by the kernels for short and for long groups; bytes as int4_reference.py.

A "word" is a tensor [G, 8]: for each of G groups, the eight weights of one packed word. A group lies in one thread, so
that the pinned order of sums costs nothing. FP fusion is off; where a fused multiply-add is wanted it is written out.
"""

# Triton compiles these from the types it is called with.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from memopt.kernels.device.triton_math import INTERPRETED, bf16_bits_to_f32, e4m3_bits_to_f32
from memopt.kernels.int4_spec import POWER_CUBIC, POWER_SEED, POWER_SLOPE
from memopt.kernels.layout import (
    CODES_PER_WORD,
    F32_MAGNITUDE_MASK,
    F32_MAX_BITS,
    GPU_LOAD_BYTES,
    INT4_BITS,
    INT4_CODE_MAX,
    INT4_CODE_MIN,
    INT4_CODE_OFFSET,
    INT4_HALF_SPAN,
)

# Within these no product of a code and a scale, no reciprocal and no remainder leaves the normal float32 numbers.
SAFE_SCALE_MIN = 2.0**-100
SAFE_SCALE_MAX = 2.0**120
# Weights of a chunk: four words, which one thread stores at once.
CHUNK_WORDS = 4
CHUNK_WEIGHTS = CHUNK_WORDS * CODES_PER_WORD

_MIN = tl.constexpr(SAFE_SCALE_MIN)
_MAX = tl.constexpr(SAFE_SCALE_MAX)
_HALF_SPAN = tl.constexpr(INT4_HALF_SPAN)
_HALF_SPAN_INVERSE = tl.constexpr(1.0 / INT4_HALF_SPAN)
_LOW = tl.constexpr(float(INT4_CODE_MIN))
_HIGH = tl.constexpr(float(INT4_CODE_MAX))
_EIGHT = tl.constexpr(CODES_PER_WORD)
_CHUNK_WORDS = tl.constexpr(CHUNK_WORDS)
_CODE_BITS = tl.constexpr(INT4_BITS)
_LOAD_BYTES = tl.constexpr(GPU_LOAD_BYTES)
# Added to |x| < 2**22, it leaves x rounded to an integer, ties to even, in the low mantissa bits.
_ROUND = tl.constexpr(12582912.0)
# The same with the code's offset, so that a nibble needs no further addition.
_ROUND_CODE = tl.constexpr(12582912.0 + INT4_CODE_OFFSET)
# What the upper bits of eight such numbers, each shifted to its nibble, add to a word.
_WORD_EXCESS = tl.constexpr(sum(0x4B400000 << (INT4_BITS * j) for j in range(CODES_PER_WORD)) & 0xFFFFFFFF)
_SEED = tl.constexpr(POWER_SEED)
_SLOPE = tl.constexpr(POWER_SLOPE)
_C0, _C1, _C2, _C3 = (tl.constexpr(factor) for factor in POWER_CUBIC)
_MAGNITUDE = tl.constexpr(F32_MAGNITUDE_MASK)
_LARGEST = tl.constexpr(F32_MAX_BITS)


@triton.jit
def fma(a, b, c):
    """a * b + c of float32, rounded once; in the interpreter through float64, which holds the product exactly."""
    if INTERPRETED:
        return (tl.cast(a, tl.float64) * tl.cast(b, tl.float64) + tl.cast(c, tl.float64)).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@triton.jit
def divide(x, divisor, inverse):
    """x / divisor, correctly rounded, from the correctly rounded inverse (P. Markstein, IBM J. Res. Dev. 34, 1990)."""
    quotient = x * inverse
    return fma(fma(-quotient, divisor, x), inverse, quotient)


@triton.jit
def round_bf16(x):
    """float32 `x` rounded to BF16, still float32; no NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def power_04(x):
    """|x| ** 0.4 as number_reference.power_04 computes it."""
    bits = tl.minimum(x.to(tl.int32, bitcast=True) & _MAGNITUDE, _LARGEST)
    x = bits.to(tl.float32, bitcast=True)
    z = (bits.to(tl.float32) * -_SLOPE + _SEED).to(tl.int32).to(tl.float32, bitcast=True)
    square = z * z
    y = x * (square * z)
    h = 1.0 - y * square
    return y * (((h * _C3 + _C2) * h + _C1) * h + _C0)


@triton.jit
def sum_eight(x, GROUPS: tl.constexpr):
    """Sums [G] of a word [G, 8] in the pinned order: ((0+1)+(2+3))+((4+5)+(6+7))."""
    even, odd = tl.split(tl.reshape(x, [GROUPS, 4, 2]))
    even, odd = tl.split(tl.reshape(even + odd, [GROUPS, 2, 2]))
    low, high = tl.split(even + odd)
    return low + high


@triton.jit
def load_chunk(weight, scales, start, column, row_scale, is_valid, num_columns, IS_FP8: tl.constexpr,
               GROUPS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, ONE_SCALE: tl.constexpr,
               HAS_TAIL: tl.constexpr):  # fmt: skip
    """float32 weights of four words, 16 bytes a load: two words of FP8 or one of BF16.

    For each group [G]: `start` is the place of the chunk's first weight in `weight`, `column` that weight's column,
    `row_scale` the place of its row's scales in `scales`. SCALE_COLUMNS is a block's width, 0 for whole rows; ONE_SCALE
    says that no chunk lies in two blocks, HAS_TAIL that the last chunk may reach past `num_columns` (zeros there).
    """
    words = ()
    if IS_FP8:
        byte = tl.arange(0, _LOAD_BYTES)[None, :]
        if SCALE_COLUMNS == 0:
            scale = tl.load(scales + row_scale, mask=is_valid, other=0.0)[:, None]
        elif ONE_SCALE:
            scale = tl.load(scales + row_scale + column // SCALE_COLUMNS, mask=is_valid, other=0.0)[:, None]
        for i in tl.static_range(_CHUNK_WORDS // 2):
            mask = is_valid[:, None]
            if HAS_TAIL:
                mask = mask & (column[:, None] + (i * _LOAD_BYTES + byte) < num_columns)
            bits = tl.load(weight + start[:, None] + (i * _LOAD_BYTES + byte), mask=mask, other=0)
            if INTERPRETED:
                value = e4m3_bits_to_f32(bits)
            else:
                value = bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)
            if SCALE_COLUMNS != 0 and not ONE_SCALE:
                at = (column[:, None] + (i * _LOAD_BYTES + byte)) // SCALE_COLUMNS
                scale = tl.load(scales + row_scale[:, None] + at, mask=mask, other=0.0)
            value = value * scale
            low, high = tl.split(tl.permute(tl.reshape(value, [GROUPS, 2, _EIGHT]), (0, 2, 1)))
            words = words + (low, high)  # type: ignore[assignment]  # noqa: RUF005
    else:
        element = tl.arange(0, _EIGHT)[None, :]
        for i in tl.static_range(_CHUNK_WORDS):
            mask = is_valid[:, None]
            if HAS_TAIL:
                mask = mask & (column[:, None] + (i * _EIGHT + element) < num_columns)
            bits = tl.load(weight + start[:, None] + (i * _EIGHT + element), mask=mask, other=0)
            words = words + (bf16_bits_to_f32(bits),)  # type: ignore[assignment]  # noqa: RUF005
    return words


@triton.jit
def largest_magnitude(words, largest, WORDS: tl.constexpr):
    """max(largest, |w|) [G] over the words."""
    for i in tl.static_range(WORDS):
        largest = tl.maximum(largest, tl.max(tl.abs(words[i]), axis=1))
    return largest


@triton.jit
def absmax_scale(largest, factor):
    """BF16 scale (as float32) [G] of groups whose largest magnitude is `largest`: factor * largest / 7.5."""
    return round_bf16(divide(largest * factor, _HALF_SPAN, _HALF_SPAN_INVERSE))


@triton.jit
def is_unsafe_scale(largest, absmax):
    """True [G] where float32 might not hold what this file computes exactly."""
    return (largest > 0) & ((absmax < _MIN) | (absmax > _MAX))


@triton.jit
def reciprocal(scale):
    """1 / scale [G, 1] of BF16 scales, correctly rounded: one Newton step from a quotient that may be two ulp off.

    tests/kernels/test_int4_rounding.py tries every BF16 significand.
    """
    near = 1.0 / scale
    return fma(fma(-scale, near, 1.0), near, near)[:, None]


@triton.jit
def _error_terms(word, quotient, scale, low, high, NORM: tl.constexpr):
    difference = fma(-tl.minimum(tl.maximum(quotient, low), high), scale, word)
    terms = difference * difference
    if NORM == "2.4":
        terms = terms * power_04(difference)
    return terms


@triton.jit
def add_search_errors(words, scale, positive, negative, WORDS: tl.constexpr, GROUPS: tl.constexpr, NORM: tl.constexpr,
                      SIGNED: tl.constexpr):  # fmt: skip
    """Adds the words' errors [G] under +scale and, if SIGNED, -scale, as int4_reference.scale_error sums them."""
    inverse, scale = reciprocal(scale), scale[:, None]
    for i in tl.static_range(WORDS):
        quotient = (words[i] * inverse + _ROUND) - _ROUND
        positive += sum_eight(_error_terms(words[i], quotient, scale, _LOW, _HIGH, NORM), GROUPS)
        if SIGNED:
            negative += sum_eight(_error_terms(words[i], quotient, scale, -_HIGH, -_LOW, NORM), GROUPS)
    return positive, negative


@triton.jit
def better_scale(scale, best, candidate, positive, negative, SIGNED: tl.constexpr, may_be_negative):
    """The scale [G] with the smaller error, and that error; the earlier one when they are equal."""
    scale = tl.where(positive < best, candidate, scale)
    best = tl.where(positive < best, positive, best)
    if SIGNED:
        is_better = (negative < best) & may_be_negative
        scale = tl.where(is_better, -candidate, scale)
        best = tl.where(is_better, negative, best)
    return scale, best


@triton.jit
def _round_word(word, scale, inverse, IS_SEARCHED: tl.constexpr):
    """Packed codes [G], differences [G, 8] and the number of clipped weights [G] of a word."""
    rounded = divide(word, scale, inverse) + _ROUND_CODE
    clamped = tl.minimum(rounded, _ROUND_CODE + _HIGH)
    if IS_SEARCHED:  # absmax never rounds below -8
        clamped = tl.maximum(clamped, _ROUND_CODE + _LOW)
    bits = clamped.to(tl.int32, bitcast=True)
    if IS_SEARCHED:
        clipped = tl.sum((rounded != clamped).to(tl.int32), axis=1)
    else:  # 8 became 7; two sums take three operands an instruction
        clipped = tl.sum(rounded.to(tl.int32, bitcast=True), axis=1) - tl.sum(bits, axis=1)
    difference = fma(-(clamped - _ROUND_CODE), scale, word)
    shift = (tl.arange(0, _EIGHT) * _CODE_BITS)[None, :]
    packed = tl.sum(bits.to(tl.uint32, bitcast=True) << shift, axis=1) - _WORD_EXCESS
    return packed.to(tl.int32, bitcast=True), difference, clipped


@triton.jit
def round_chunk(words, first, scale, inverse, square_sum, energy_sum, largest_error, num_clipped, GROUPS: tl.constexpr,
                IS_SEARCHED: tl.constexpr):  # fmt: skip
    """Four packed words [G, 4] of `words` from number `first` on, and the four figures [G] that they are added to."""
    codes = ()
    for i in tl.static_range(_CHUNK_WORDS):
        word = words[first + i]
        code, difference, clipped = _round_word(word, scale, inverse, IS_SEARCHED)
        codes = codes + (code,)  # type: ignore[assignment]  # noqa: RUF005
        square_sum += sum_eight(difference * difference, GROUPS)
        energy_sum += sum_eight(word * word, GROUPS)
        largest_error = tl.maximum(largest_error, tl.max(tl.abs(difference), axis=1))
        num_clipped += clipped
    packed = tl.join(tl.join(codes[0], codes[2]), tl.join(codes[1], codes[3]))  # type: ignore[misc]
    return tl.reshape(packed, [GROUPS, _CHUNK_WORDS]), square_sum, energy_sum, largest_error, num_clipped
