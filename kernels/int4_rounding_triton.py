"""Steps of INT4 rounding on the GPU, shared by the kernels for short and for long groups; bytes as int4_reference.py.

Weights are tuples of tensors [G], one tensor for each place in a group and one element for each of G groups; the search
joins eight of them to a "word" [G, 8]. A group lies in one thread, so that the pinned order of sums costs nothing. FP
fusion is off; where a fused multiply-add is wanted it is written out. USE_ASSEMBLY: device/half_pairs.py.
"""

# Triton compiles these from the types it is called with.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from memopt.kernels.device.half_pairs import (
    add_clipped,
    clamp_codes,
    decode_e4m3,
    largest_pair,
    num_clipped,
    pack_codes,
    round_pair,
    widen,
)
from memopt.kernels.device.triton_math import INTERPRETED, bf16_bits_to_f32, constant, e4m3_bits_to_f32, to_bf16
from memopt.kernels.int4_spec import POWER_CUBIC, POWER_SEED, POWER_SLOPE
from memopt.kernels.layout import (
    BF16_BITS,
    CODES_PER_WORD,
    E4M3_BITS,
    F16_SUBNORMAL_UNIT,
    F32_MAGNITUDE_MASK,
    F32_MAX_BITS,
    INT4_CODE_MAX,
    INT4_CODE_MIN,
    INT4_HALF_SPAN,
)

# Within these no product of a code and a scale, no reciprocal and no remainder leaves the normal float32 numbers, nor
# does a quotient under FP16's subnormal unit.
SAFE_SCALE_MIN = 2.0**-100
SAFE_SCALE_MAX = 2.0**60
# No smaller square has lost bits, so that its root is the number that was squared.
SAFE_SQUARE_MIN = 2.0**-120
# Weights of a chunk: four words, which one thread stores at once.
CHUNK_WORDS = 4
CHUNK_WEIGHTS = CHUNK_WORDS * CODES_PER_WORD

_BYTE_BITS = tl.constexpr(E4M3_BITS)
_BYTE_MASK = tl.constexpr((1 << E4M3_BITS) - 1)
_HALF_BITS = tl.constexpr(BF16_BITS)
_HALF_MASK = tl.constexpr((1 << BF16_BITS) - 1)
_MIN = tl.constexpr(SAFE_SCALE_MIN)
_MAX = tl.constexpr(SAFE_SCALE_MAX)
_SQUARE_MIN = tl.constexpr(SAFE_SQUARE_MIN)
_HALF_SPAN = tl.constexpr(INT4_HALF_SPAN)
_HALF_SPAN_INVERSE = tl.constexpr(1.0 / INT4_HALF_SPAN)
_LOW = tl.constexpr(float(INT4_CODE_MIN))
_HIGH = tl.constexpr(float(INT4_CODE_MAX))
_EIGHT = constant(CODES_PER_WORD)
_CHUNK_WORDS = constant(CHUNK_WORDS)
_CHUNK_WEIGHTS = constant(CHUNK_WEIGHTS)
_CODES_A_UNIT = tl.constexpr(1.0 / F16_SUBNORMAL_UNIT)
_RECIPROCAL = tl.constexpr("rcp.approx.ftz.f32 $0, $1;")
# Added to |x| < 2**22, it leaves x rounded to an integer, ties to even, in the low mantissa bits.
_ROUND = tl.constexpr(12582912.0)
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
def _split_four(x, GROUPS: tl.constexpr):
    even, odd = tl.split(tl.reshape(x, [GROUPS, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _widen_bf16(pair):
    return bf16_bits_to_f32(pair.to(tl.int16)), (pair & ~_HALF_MASK).to(tl.float32, bitcast=True)


@triton.jit
def _widen_words(words, largest, IS_FP8: tl.constexpr, USE_ASSEMBLY: tl.constexpr):
    """Weights [G] of four int32 [G], four FP8 ones without their scale or two BF16 ones each.

    `largest`, their largest magnitude: with PTX a pair, of the lower and of the upper halves, else a float32.
    """
    values = ()
    for i in tl.static_range(4):
        if not IS_FP8:
            new = _widen_bf16(words[i])
            if USE_ASSEMBLY:
                largest = largest_pair(largest, words[i], True)
        elif USE_ASSEMBLY:
            low, high = decode_e4m3(words[i])
            largest = largest_pair(largest_pair(largest, low, False), high, False)
            new = widen(low, True) + widen(high, True)
        else:
            new = ()
            for j in tl.static_range(4):
                new = new + (e4m3_bits_to_f32((words[i] >> (j * _BYTE_BITS)) & _BYTE_MASK),)  # noqa: RUF005
        values = values + new
        if not USE_ASSEMBLY:
            for j in tl.static_range(4 if IS_FP8 else 2):
                largest = tl.maximum(largest, tl.abs(new[j]))
    return values, largest


@triton.jit
def _largest_f32(largest, IS_FP8: tl.constexpr, USE_ASSEMBLY: tl.constexpr):
    """float32 of the largest magnitude that `_widen_words` found."""
    if not USE_ASSEMBLY:
        return largest
    elif IS_FP8:
        low, high = widen(largest, True)
        return tl.maximum(low, high)
    else:
        low, high = _widen_bf16(largest)
        return tl.maximum(low, high)


@triton.jit
def load_chunk(weight, scales, start, column, row_scale, is_valid, num_columns, IS_FP8: tl.constexpr,
               GROUPS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, ONE_SCALE: tl.constexpr, HAS_TAIL: tl.constexpr,
               USE_ASSEMBLY: tl.constexpr):  # fmt: skip
    """float32 weights of a chunk, CHUNK_WEIGHTS tensors [G], and their largest magnitude [G]; 16 bytes a load.

    For each group [G]: `start` is the place of the chunk's first weight in `weight` (int32: four FP8 or two BF16
    weights), `column` that weight's column, `row_scale` the place of its row's scales in `scales`. SCALE_COLUMNS is a
    block's width, 0 for whole rows; ONE_SCALE says that no chunk lies in two blocks, HAS_TAIL that the last chunk may
    reach past `num_columns` (zeros there). Rounding keeps order: the largest weight is the largest FP8 one, scaled.
    """
    PER_WORD: tl.constexpr = 4 if IS_FP8 else 2
    PER_LOAD: tl.constexpr = 4 * PER_WORD
    SCALE_A_WORD: tl.constexpr = IS_FP8 and not ONE_SCALE
    word = tl.arange(0, 4)[None, :]
    scale, largest = tl.full([GROUPS], 1.0, tl.float32), tl.zeros([GROUPS], tl.float32)
    # Before scaling: a pair of 16-bit numbers where PTX is used, else a float32.
    unscaled = tl.zeros([GROUPS], tl.int32 if USE_ASSEMBLY else tl.float32)
    if IS_FP8:
        if SCALE_COLUMNS == 0:
            scale = tl.load(scales + row_scale, mask=is_valid, other=0.0)
        elif ONE_SCALE:
            scale = tl.load(scales + row_scale + column // SCALE_COLUMNS, mask=is_valid, other=0.0)
    values = ()
    for i in tl.static_range(_CHUNK_WEIGHTS // PER_LOAD):
        mask = is_valid[:, None]
        if HAS_TAIL:
            mask = mask & (column[:, None] + (i * PER_LOAD + word * PER_WORD) < num_columns)
        tile = tl.load(weight + (start[:, None] + (i * 4 + word)), mask=mask, other=0)
        raw, unscaled = _widen_words(_split_four(tile, GROUPS), unscaled, IS_FP8, USE_ASSEMBLY)
        for j in tl.static_range(PER_LOAD):
            if SCALE_A_WORD and j % _EIGHT == 0:
                # A block's width is a multiple of eight weights.
                place = column + (i * PER_LOAD + j)
                inside = is_valid & (place < num_columns) if HAS_TAIL else is_valid
                scale = tl.load(scales + row_scale + place // SCALE_COLUMNS, mask=inside, other=0.0)
            value = raw[j] * scale if IS_FP8 else raw[j]
            values = values + (value,)  # type: ignore[assignment]  # noqa: RUF005
            if SCALE_A_WORD:
                largest = tl.maximum(largest, tl.abs(value))
    if not SCALE_A_WORD:
        largest = _largest_f32(unscaled, IS_FP8, USE_ASSEMBLY) * tl.abs(scale)
    return values, largest


@triton.jit
def absmax_scale(largest, factor):
    """BF16 scale (as float32) [G] of groups whose largest magnitude is `largest`: factor * largest / 7.5."""
    return to_bf16(divide(largest * factor, _HALF_SPAN, _HALF_SPAN_INVERSE)).to(tl.float32)


@triton.jit
def is_unsafe(largest, absmax, largest_square):
    """True [G] where float32 might not hold what this file computes exactly; `absmax` of an infinite weight is NaN."""
    is_square_exact = largest_square.to(tl.float32, bitcast=True) >= _SQUARE_MIN
    return (largest > 0) & ~((absmax >= _MIN) & (absmax <= _MAX) & is_square_exact)


@triton.jit
def reciprocal(scale):
    """1 / scale of BF16 scales, correctly rounded: one Newton step from a quotient that may be two ulp off.

    tests/kernels/test_int4_rounding.py tries every BF16 significand.
    """
    near = 1.0 / scale
    return fma(fma(-scale, near, 1.0), near, near)


@triton.jit
def split_reciprocal(divisor, USE_ASSEMBLY: tl.constexpr):
    """1 / divisor of BF16 numbers as a sum of two float32, the second what the first one lacks: exact to 2**-44.

    x * first + (x * second), fused, is on a tie where x / divisor is, and on its side of the tie where it is not:
    a weight beside a tie is at least 0.502 ulp of the quotient away (test_int4_rounding.py). `divide` needs one more.
    """
    if USE_ASSEMBLY:
        near = tl.inline_asm_elementwise(_RECIPROCAL, "=f,f", [divisor], dtype=tl.float32, is_pure=True, pack=1)
    else:
        near = 1.0 / divisor
    return near, fma(-divisor, near, 1.0) * near


@triton.jit
def _error_terms(word, quotient, scale, low, high, NORM: tl.constexpr):
    difference = fma(-tl.minimum(tl.maximum(quotient, low), high), scale, word)
    terms = difference * difference
    if NORM == "2.4":
        terms = terms * power_04(difference)
    return terms


@triton.jit
def join_eight(values, FIRST: tl.constexpr, GROUPS: tl.constexpr):
    """A word [G, 8] of eight tensors [G] of `values`, from number FIRST on."""
    even = tl.join(tl.join(values[FIRST], values[FIRST + 4]), tl.join(values[FIRST + 2], values[FIRST + 6]))
    odd = tl.join(tl.join(values[FIRST + 1], values[FIRST + 5]), tl.join(values[FIRST + 3], values[FIRST + 7]))
    return tl.reshape(tl.join(even, odd), [GROUPS, 8])


@triton.jit
def add_search_errors(values, scale, positive, negative, WEIGHTS: tl.constexpr, GROUPS: tl.constexpr,
                      NORM: tl.constexpr, SIGNED: tl.constexpr):  # fmt: skip
    """Adds WEIGHTS weights' errors [G] under +scale and, if SIGNED, -scale, as int4_reference.scale_error sums them."""
    inverse, scale = reciprocal(scale)[:, None], scale[:, None]
    for i in tl.static_range(WEIGHTS // _EIGHT):
        word = join_eight(values, i * _EIGHT, GROUPS)
        quotient = (word * inverse + _ROUND) - _ROUND
        positive += sum_eight(_error_terms(word, quotient, scale, _LOW, _HIGH, NORM), GROUPS)
        if SIGNED:
            negative += sum_eight(_error_terms(word, quotient, scale, -_HIGH, -_LOW, NORM), GROUPS)
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
def _sum_tree(x):
    """Sum [G] of eight tensors [G] in the pinned order."""
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]))


@triton.jit
def _round_eight(eight, divisor, inverse, residue, count, largest_square,
                 IS_SEARCHED: tl.constexpr, USE_ASSEMBLY: tl.constexpr):  # fmt: skip
    """Packed codes, squared differences, and the two running figures, of eight weights.

    Rounding to FP16 subnormals rounds quotients, which `inverse` leaves in their unit, to integers.
    """
    clamped, against = (), -divisor
    for i in tl.static_range(4):
        low, high = eight[i // 2 * 4 + i % 2], eight[i // 2 * 4 + i % 2 + 2]
        low, high = fma(low, inverse, low * residue), fma(high, inverse, high * residue)
        pair = round_pair(low, high, USE_ASSEMBLY)
        # absmax never rounds below -8
        within = clamp_codes(pair, IS_SEARCHED, USE_ASSEMBLY)
        count = add_clipped(count, pair, within, IS_SEARCHED, USE_ASSEMBLY)
        clamped = clamped + (within,)  # type: ignore[assignment]  # noqa: RUF005
    squares = ()
    for i in tl.static_range(8):
        low, high = widen(clamped[i // 4 * 2 + i % 2], USE_ASSEMBLY)
        difference = fma(low if i % 4 < 2 else high, against, eight[i])
        square = difference * difference
        squares = squares + (square,)  # type: ignore[assignment]  # noqa: RUF005
    for i in tl.static_range(8):
        # float32 that is not negative sorts as its bits do; a maximum of three integers is one instruction.
        largest_square = tl.maximum(largest_square, squares[i].to(tl.int32, bitcast=True))
    packed = pack_codes(clamped[0], clamped[1], clamped[2], clamped[3], USE_ASSEMBLY)  # type: ignore[misc]
    return packed, _sum_tree(squares), count, largest_square


@triton.jit
def round_chunk(values, FIRST: tl.constexpr, scale, square_sum, energy_sum, largest_square, clipped_sum,
                GROUPS: tl.constexpr, IS_SEARCHED: tl.constexpr, USE_ASSEMBLY: tl.constexpr):  # fmt: skip
    """Four packed words [G, 4] of `values` from number FIRST on, and the four figures [G] that they are added to.

    `largest_square` holds the bits of the largest squared difference.
    """
    divisor = scale * _CODES_A_UNIT
    inverse, residue = split_reciprocal(divisor, USE_ASSEMBLY)
    count = tl.zeros_like(clipped_sum)
    words = ()
    for i in tl.static_range(_CHUNK_WORDS):
        eight, energies = (), ()
        for j in tl.static_range(8):
            weight = values[FIRST + i * _EIGHT + j]
            eight = eight + (weight,)  # type: ignore[assignment]  # noqa: RUF005
            energies = energies + (weight * weight,)  # type: ignore[assignment]  # noqa: RUF005
        packed, squares, count, largest_square = _round_eight(
            eight, divisor, inverse, residue, count, largest_square, IS_SEARCHED, USE_ASSEMBLY)  # fmt: skip
        words = words + (packed,)  # type: ignore[assignment]  # noqa: RUF005
        square_sum += squares
        energy_sum += _sum_tree(energies)
    clipped_sum += num_clipped(count, IS_SEARCHED)
    packed = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3]))  # type: ignore[misc]
    return tl.reshape(packed, [GROUPS, _CHUNK_WORDS]), square_sum, energy_sum, largest_square, clipped_sum
