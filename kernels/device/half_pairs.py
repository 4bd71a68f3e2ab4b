"""Two 16-bit floats in one int32 register, as NVIDIA's packed instructions take them: half the instructions a number.

PTX does not exist in the interpreter or on AMD: USE_ASSEMBLY chooses between one PTX instruction and plain operations
that give the same bits. Codes -8..7 travel as FP16 subnormals: code * 2**-24 has the bits of the code, sign apart.
"""

# Triton compiles these from the types it is called with.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from memopt.kernels.layout import (
    BF16_SHIFT,
    EACH_HALF,
    F16_SIGN_MASK,
    F16_SUBNORMAL_UNIT,
    INT4_BITS,
    INT4_CODE_MAX,
    INT4_CODE_MIN,
    INT4_CODE_OFFSET,
)

# The first NVIDIA devices with e4m3 conversions.
ASSEMBLY_CAPABILITY = (8, 9)

_HALF_BITS = tl.constexpr(BF16_SHIFT)
_HALF_MASK = tl.constexpr((1 << BF16_SHIFT) - 1)
_UNIT = tl.constexpr(F16_SUBNORMAL_UNIT)
_CODES_A_UNIT = tl.constexpr(1.0 / F16_SUBNORMAL_UNIT)
_MIN = tl.constexpr(float(INT4_CODE_MIN))
_MAX = tl.constexpr(float(INT4_CODE_MAX))
_OFFSET = tl.constexpr(INT4_CODE_OFFSET)
_CODE_BITS = tl.constexpr(INT4_BITS)

_LOW_BYTES = tl.constexpr("{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.rn.f16x2.e4m3x2 $0, low; }")
_HIGH_BYTES = tl.constexpr("{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.rn.f16x2.e4m3x2 $0, high; }")
_LOW_HALF = tl.constexpr("{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.f32.f16 $0, low; }")
_HIGH_HALF = tl.constexpr("{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.f32.f16 $0, high; }")
_LARGEST = tl.constexpr("{ .reg .b32 size; abs.f16x2 size, $2; max.f16x2 $0, $1, size; }")
_LARGEST_BF16 = tl.constexpr("{ .reg .b32 size; abs.bf16x2 size, $2; max.bf16x2 $0, $1, size; }")
_ROUND = tl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
_BELOW_MAX = tl.constexpr(
    f"{{ .reg .b32 most; mov.b32 most, {EACH_HALF * INT4_CODE_MAX:#x}; min.f16x2 $0, $1, most; }}"
)
_ABOVE_MIN = tl.constexpr(
    f"{{ .reg .b32 least; mov.b32 least, {EACH_HALF * (F16_SIGN_MASK - INT4_CODE_MIN):#x}; max.f16x2 $0, $1, least; }}"
)
# 16.0 in each half, and the offset of a low and a high nibble, 8 * 17.
_PACK = tl.constexpr(
    "{ .reg .b32 base, offset, low, high;"
    f" mov.b32 base, {EACH_HALF * 0x4C00:#x}; mov.b32 offset, {EACH_HALF * INT4_CODE_OFFSET * 17:#x};"
    " fma.rn.f16x2 low, $2, base, $1; add.f16x2 low, low, offset;"
    " fma.rn.f16x2 high, $4, base, $3; add.f16x2 high, high, offset;"
    " prmt.b32 $0, low, high, 0x6420; }"
)
_DIFFERENT = tl.constexpr("set.ne.u32.f16x2 $0, $1, $2;")


@triton.jit
def widen(pair, USE_ASSEMBLY: tl.constexpr):
    """float32 of the low and of the high FP16 number of `pair`, exact."""
    if USE_ASSEMBLY:
        low = tl.inline_asm_elementwise(_LOW_HALF, "=f,r", [pair], dtype=tl.float32, is_pure=True, pack=1)
        high = tl.inline_asm_elementwise(_HIGH_HALF, "=f,r", [pair], dtype=tl.float32, is_pure=True, pack=1)
        return low, high
    else:
        low, high = pair.to(tl.int16), (pair >> _HALF_BITS).to(tl.int16)
        return low.to(tl.float16, bitcast=True).to(tl.float32), high.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def round_pair(low, high, USE_ASSEMBLY: tl.constexpr):
    """FP16 of two float32, to nearest, ties to even; subnormals too."""
    if USE_ASSEMBLY:
        return tl.inline_asm_elementwise(_ROUND, "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1)
    else:
        low, high = low.to(tl.float16).to(tl.int16, bitcast=True), high.to(tl.float16).to(tl.int16, bitcast=True)
        return (low.to(tl.int32) & _HALF_MASK) | (high.to(tl.int32) << _HALF_BITS)


@triton.jit
def decode_e4m3(word):
    """The four e4m3 bytes of int32 `word` as two FP16 pairs, exact; NaN stays NaN. PTX only."""
    low = tl.inline_asm_elementwise(_LOW_BYTES, "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1)
    high = tl.inline_asm_elementwise(_HIGH_BYTES, "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1)
    return low, high


@triton.jit
def largest_pair(largest, pair, IS_BF16: tl.constexpr):
    """max(largest, |pair|), half by half, of FP16 or BF16; `largest` is not negative; NaN is passed over. PTX only."""
    if IS_BF16:
        return tl.inline_asm_elementwise(_LARGEST_BF16, "=r,r,r", [largest, pair], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return tl.inline_asm_elementwise(_LARGEST, "=r,r,r", [largest, pair], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def clamp_codes(codes, BOTH_ENDS: tl.constexpr, USE_ASSEMBLY: tl.constexpr):
    """Codes (FP16 units) of a pair, at most 7; and at least -8 if BOTH_ENDS."""
    if USE_ASSEMBLY:
        codes = tl.inline_asm_elementwise(_BELOW_MAX, "=r,r", [codes], dtype=tl.int32, is_pure=True, pack=1)
        if BOTH_ENDS:
            codes = tl.inline_asm_elementwise(_ABOVE_MIN, "=r,r", [codes], dtype=tl.int32, is_pure=True, pack=1)
        return codes
    else:
        low, high = widen(codes, False)
        low, high = tl.minimum(low, _MAX * _UNIT), tl.minimum(high, _MAX * _UNIT)
        if BOTH_ENDS:
            low, high = tl.maximum(low, _MIN * _UNIT), tl.maximum(high, _MIN * _UNIT)
        return round_pair(low, high, False)


@triton.jit
def add_clipped(count, codes, clamped, BOTH_ENDS: tl.constexpr, USE_ASSEMBLY: tl.constexpr):
    """`count` (int32, for `num_clipped`; starts as 0) and one for each half in which the codes differ.

    Up to 32,767 a half. Unless BOTH_ENDS, codes differ only as 8 does from 7, which is one as integers too.
    """
    if not BOTH_ENDS:
        return count + (codes - clamped)
    elif USE_ASSEMBLY:
        return count - tl.inline_asm_elementwise(
            _DIFFERENT, "=r,r,r", [codes, clamped], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        different = codes ^ clamped
        low = tl.where((different & _HALF_MASK) != 0, _HALF_MASK, 0)
        return count - (low | (tl.where((different >> _HALF_BITS) != 0, _HALF_MASK, 0) << _HALF_BITS))


@triton.jit
def num_clipped(count, BOTH_ENDS: tl.constexpr):
    """What `add_clipped` counted in both halves together."""
    low = (count << _HALF_BITS) >> _HALF_BITS
    high = (count - low) >> _HALF_BITS
    # 0xFFFF taken away in the lower half adds 1 there and borrows 1 from the upper one.
    return high + low * 2 if BOTH_ENDS else high + low


@triton.jit
def pack_codes(codes02, codes13, codes46, codes57, USE_ASSEMBLY: tl.constexpr):
    """int32 words of eight codes -8..7 (FP16 units) in four pairs: code + 8, element j in bits 4j..4j+3."""
    if USE_ASSEMBLY:
        return tl.inline_asm_elementwise(
            _PACK, "=r,r,r,r,r", [codes02, codes13, codes46, codes57], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        pairs = (codes02, codes13, codes46, codes57)
        word = tl.zeros_like(codes02)
        for i in tl.static_range(4):
            low, high = widen(pairs[i], False)
            word |= ((low * _CODES_A_UNIT).to(tl.int32) + _OFFSET) << (_CODE_BITS * (i // 2 * 4 + i % 2))
            word |= ((high * _CODES_A_UNIT).to(tl.int32) + _OFFSET) << (_CODE_BITS * (i // 2 * 4 + i % 2 + 2))
        return word
