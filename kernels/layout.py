"""Every byte layout and number format, written once. Nothing else in memopt spells these numbers."""

from __future__ import annotations

BITS_PER_BYTE = 8
# Times a field's value: the same field in every 4, 8 or 16 bits of a 32-bit word.
EACH_NIBBLE = 0x11111111
EACH_BYTE = 0x01010101
EACH_HALF = 0x00010001

# INT4, compressed-tensors "pack-quantized" (compressed_tensors/compressors/pack_quantized/helpers.py):
# code + 8 in 4 bits, eight codes a little-endian 32-bit word along `in`, element j in bits 4j..4j+3.
INT4_BITS = 4
INT4_CODE_MIN = -8
INT4_CODE_MAX = 7
INT4_CODE_OFFSET = 8
INT4_CODE_MASK = 0xF
WORD_BITS = 32
CODES_PER_WORD = WORD_BITS // INT4_BITS
# Half the span of -8..7: the absmax rule's divisor (compressed-tensors' symmetric scale).
INT4_HALF_SPAN = 7.5
INT4_GROUP_SIZES = (32, 64, 128)

# FP8 e4m3fn: sign, 4 exponent bits (bias 7), 3 mantissa bits; no infinities, 0x7F and 0xFF are NaN; largest 448.
E4M3_MAGNITUDE_MASK = 0x7F
E4M3_SIGN_MASK = 0x80
E4M3_NAN_MAGNITUDE = 0x7F
E4M3_MAX = 448.0
E4M3_BITS = 8
E4M3_MANTISSA_BITS = 3
E4M3_MIN_SUBNORMAL = 2.0**-9
E4M3_EXPONENT_BIAS = 7
FP8_BLOCK_ROWS = 128
FP8_BLOCK_COLUMNS = 128

# UE8M0: an exponent byte alone, 2**(byte - 127); 255 is NaN (OCP Microscaling Formats v1.0, section 5.4.1).
UE8M0_BIAS = 127
UE8M0_NAN = 0xFF
UE8M0_CODES = 256
UE8M0_MIN_VALUE = 2.0**-UE8M0_BIAS

# BF16 is the upper half of an IEEE float32; float32 field positions.
BF16_SHIFT = 16
BF16_BITS = 16
BF16_MAGNITUDE_MASK = 0x7FFF
BF16_INFINITY_BITS = 0x7F80
F32_BITS = 32
F32_MANTISSA_BITS = 23
F32_EXPONENT_BIAS = 127
F32_MAGNITUDE_MASK = 0x7FFFFFFF
F32_INFINITY_BITS = 0x7F800000
F32_SIGN_MASK = 0x80000000
F32_QUIET_NAN_BITS = 0x7FC00000
F32_MAX_BITS = 0x7F7FFFFF

# The numba kernels read their source a 64-bit word at a time: eight FP8 weights or four BF16 ones.
LOAD_WORD_BITS = 64
FP8_PER_LOAD_WORD = LOAD_WORD_BITS // E4M3_BITS
BF16_PER_LOAD_WORD = LOAD_WORD_BITS // BF16_BITS
