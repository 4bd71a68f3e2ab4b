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

# The planar form of INT4 words that the GEMM kernels read (docs/kernels/int4_gemm.md): along `in`, a block of
# 256 codes is 32 words; word i holds code 32 * j + i of the block in nibble j. One load gives eight rows of 32 codes.
PLANAR_BLOCK_CODES = 256
PLANAR_BLOCK_WORDS = PLANAR_BLOCK_CODES // CODES_PER_WORD

# KV cache: pages of tokens, shared by every pool of a layer (latent or heads, scales, rope, indexer).
PAGE_TOKENS = 64
# A slot (page * PAGE_TOKENS + position in page) below zero is padding: it is never written and never read.
PADDING_SLOT = -1

# MLA: the latent and the rotary part of the one shared key of a token (GLM-5.x, Kimi K2, DeepSeek V3), in elements.
MLA_LATENT_SIZE = 512
MLA_ROPE_SIZE = 64
MLA_KEY_SIZE = MLA_LATENT_SIZE + MLA_ROPE_SIZE

# KV format fp8_ds_mla (FlashMLA README; vLLM v1/attention/backends/mla/flashmla_sparse.py), bytes of one token:
# 512 e4m3 latent | 4 float32 scales, one per 128 latent elements | 64 BF16 rope.
DS_MLA_SCALE_GROUP = 128
DS_MLA_NUM_SCALES = MLA_LATENT_SIZE // DS_MLA_SCALE_GROUP
DS_MLA_SCALES_OFFSET_BYTES = MLA_LATENT_SIZE
DS_MLA_ROPE_OFFSET_BYTES = DS_MLA_SCALES_OFFSET_BYTES + DS_MLA_NUM_SCALES * (F32_BITS // BITS_PER_BYTE)
DS_MLA_TOKEN_BYTES = DS_MLA_ROPE_OFFSET_BYTES + MLA_ROPE_SIZE * (BF16_BITS // BITS_PER_BYTE)

# DSA indexer cache: 128 e4m3 and one float32 scale (a power of two) a token. A page holds the values of its 64 tokens
# first, then their 64 scales (vLLM models/deepseek_v32/common/kernels.py; SGLang: uint8 [pages, 64 * 132]).
INDEXER_KEY_SIZE = 128
INDEXER_SCALE_BYTES = F32_BITS // BITS_PER_BYTE
INDEXER_TOKEN_BYTES = INDEXER_KEY_SIZE + INDEXER_SCALE_BYTES
INDEXER_PAGE_SCALES_OFFSET_BYTES = PAGE_TOKENS * INDEXER_KEY_SIZE
INDEXER_PAGE_BYTES = PAGE_TOKENS * INDEXER_TOKEN_BYTES

# Page tags: one 64-bit number a physical page, unique over the life of the process; 0 is never given out.
NO_TAG = 0

# Smallest scale of a group: FLT_MIN for fp8_ds_mla (vLLM csrc/cache_kernels.cu, concat_and_cache_ds_mla_kernel), and
# 1e-4 / 448 rounded up to a power of two for the indexer (same file, indexer_k_quant_and_cache_kernel).
DS_MLA_MIN_SCALE = 2.0**-126
INDEXER_MIN_SCALE = 2.0**-22
# Added to the bits of a positive float32 and cut to the exponent field, it rounds up to a power of two.
F32_BELOW_NEXT_POWER = (1 << F32_MANTISSA_BITS) - 1
# What a pool's first byte and page stride are multiples of: the widest load of a GPU.
POOL_ALIGNMENT_BYTES = 16

# KV format int8 of grouped-query caches: a signed byte an element.
INT8_BITS = 8

# Calibration. A Hessian is summed in chunks of an expert's tokens, each chunk by itself (docs/kernels/calibration.md).
HESSIAN_CHUNK_TOKENS = 4096
# GPTQ solves this many columns at a time on the chip; the columns behind are corrected by one product a block.
GPTQ_BLOCK_COLUMNS = 128

# Planar words: `in` is padded to whole blocks with code 0 under scale 0, so that padding adds nothing. Two BF16 scales
# of a row share a 32-bit word, the even group in the low half.
PLANAR_PADDING_WORD = EACH_NIBBLE * INT4_CODE_OFFSET
PLANAR_SCALES_PER_WORD = WORD_BITS // BF16_BITS
# BF16 of 128.0. Its last mantissa bit counts 1, so a nibble set into the low bits adds the nibble; less 136.0
# (128 + 8) that is the code. The two-word unpacking of the GPU kernels rests on it.
BF16_128_BITS = 0x4300
BF16_136_BITS = BF16_128_BITS | INT4_CODE_OFFSET

# The widest load of one GPU thread (LDG.E.128): two INT4 words' worth of FP8 weights, one of BF16.
GPU_LOAD_BYTES = 16

# FP16 (IEEE binary16): sign, 5 exponent bits, 10 mantissa bits; the largest number is 65504.
F16_MAGNITUDE_MASK = 0x7FFF
F16_INFINITY_BITS = 0x7C00
F16_SIGN_MASK = 0x8000
# Subnormals are multiples of it, 0 to 1023 times; their bits are the multiple.
F16_SUBNORMAL_UNIT = 2.0**-24

# The reference KV format (fp32) keeps indexer keys as float32, without scales.
INDEXER_PAGE_ELEMENTS = PAGE_TOKENS * INDEXER_KEY_SIZE

# Histogram of magnitudes, for scales of a KV cache: a bin for every exponent and 6 mantissa bits of a float32.
MAGNITUDE_BIN_SHIFT = F32_MANTISSA_BITS - 6
MAGNITUDE_BINS = 1 << (F32_BITS - 1 - MAGNITUDE_BIN_SHIFT)

# A page tag: the number of its tracker in the process, then a count of that tracker's allocations. 63 bits, so that
# int64 keeps it positive; 2**40 allocations are 3 years of 10,000 a second.
TAG_COUNTER_BITS = 40
TAG_SERIES_BITS = 23

# Calibration keeps an expert's tokens back until they fill such a chunk, so that sums do not depend on how they came.
CALIBRATION_CHUNK_TOKENS = 1024
