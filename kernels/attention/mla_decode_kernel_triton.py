"""The kernel of MLA decode: one request, one tile of heads and one split a program.

The latent is handled in four groups of 128, the groups that fp8_ds_mla scales. docs/kernels/attention.md has the
algebra and says which products are exact.
"""

# Triton compiles these from the types it is called with.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from memopt.kernels.attention.decode_math_triton import (
    LOG2_E,
    NO_MAXIMUM,
    WEIGHT_EXPONENT,
    e4m3_to_f16,
    load_columns,
    log_sum_exp,
    query_powers,
    reciprocal,
    softmax_step,
    split_tiles,
    store_columns,
)
from memopt.kernels.attention.page_tiles_triton import load_rows, run_places, selected_places
from memopt.kernels.device.triton_math import matmul, to_bf16
from memopt.kernels.layout import DS_MLA_MIN_SCALE, F32_EXPONENT_BIAS, F32_INFINITY_BITS, F32_MANTISSA_BITS

# Formats of a pool: bfloat16 rows, e4m3 under one scale a layer, e4m3 under a scale a group.
FORMAT_BF16 = tl.constexpr(0)
FORMAT_E4M3 = tl.constexpr(1)
FORMAT_DS_MLA = tl.constexpr(2)
# No stored scale is smaller, so that dividing by the largest is defined.
MIN_UNIT = tl.constexpr(DS_MLA_MIN_SCALE)
# Infinity has all exponent bits set and no other.
EXPONENT_BITS = tl.constexpr(F32_INFINITY_BITS)
# x and 1 / x of a power of two add up to this. The largest unit is 2**126, whose reciprocal is still a normal number.
RECIPROCAL_BITS = tl.constexpr(2 * F32_EXPONENT_BIAS << F32_MANTISSA_BITS)
MAX_UNIT_BITS = tl.constexpr((2 * F32_EXPONENT_BIAS - 1) << F32_MANTISSA_BITS)


@triton.jit
def _load_query(rows, index, is_head, GROUP: tl.constexpr):
    q0 = load_columns(rows, index, is_head, 4 * GROUP, 0, GROUP)
    q1 = load_columns(rows, index, is_head, 4 * GROUP, GROUP, GROUP)
    q2 = load_columns(rows, index, is_head, 4 * GROUP, 2 * GROUP, GROUP)
    q3 = load_columns(rows, index, is_head, 4 * GROUP, 3 * GROUP, GROUP)
    return q0, q1, q2, q3


@triton.jit
def _largest(query):
    a = tl.maximum(tl.max(tl.abs(query[0]), 0), tl.max(tl.abs(query[1]), 0))
    b = tl.maximum(tl.max(tl.abs(query[2]), 0), tl.max(tl.abs(query[3]), 0))
    return tl.maximum(a, b)


@triton.jit
def _to_f16(query, up):
    up = up[None, :]
    q0, q1 = (query[0] * up).to(tl.float16), (query[1] * up).to(tl.float16)
    q2, q3 = (query[2] * up).to(tl.float16), (query[3] * up).to(tl.float16)
    return q0, q1, q2, q3


@triton.jit
def _to_bf16(query):
    return to_bf16(query[0]), to_bf16(query[1]), to_bf16(query[2]), to_bf16(query[3])


@triton.jit
def _places(
    tile, end, table_row, positions_row, max_pages, num_pages,
    TILE: tl.constexpr, PAGE: tl.constexpr, SELECTED: tl.constexpr,
):  # fmt: skip
    if SELECTED:
        return selected_places(tile, end, table_row, positions_row, max_pages, num_pages, TILE, PAGE)
    else:
        return run_places(tile, end, table_row, num_pages, TILE, PAGE)


@triton.jit
def _load_latents(
    pool, page_stride, page, place, counts, TOKEN: tl.constexpr, GROUP: tl.constexpr, SELECTED: tl.constexpr
):
    k0 = load_rows(pool, page_stride, page, place, counts, TOKEN, 0, GROUP, SELECTED)
    k1 = load_rows(pool, page_stride, page, place, counts, TOKEN, GROUP, GROUP, SELECTED)
    k2 = load_rows(pool, page_stride, page, place, counts, TOKEN, 2 * GROUP, GROUP, SELECTED)
    k3 = load_rows(pool, page_stride, page, place, counts, TOKEN, 3 * GROUP, GROUP, SELECTED)
    return k0, k1, k2, k3


@triton.jit
def _widen(bits):
    return e4m3_to_f16(bits[0]), e4m3_to_f16(bits[1]), e4m3_to_f16(bits[2]), e4m3_to_f16(bits[3])


@triton.jit
def _load_scales(scales, page_stride, page, place, counts, TOKEN: tl.constexpr):
    start = scales + page * page_stride + place * TOKEN
    s0 = tl.load(start, mask=counts, other=0.0)
    s1 = tl.load(start + 1, mask=counts, other=0.0)
    s2 = tl.load(start + 2, mask=counts, other=0.0)
    s3 = tl.load(start + 3, mask=counts, other=0.0)
    return s0, s1, s2, s3


@triton.jit
def _new_unit(unit, scales):
    """The largest scale so far, rounded down to a power of two, and 1 over it, exactly."""
    largest = tl.max(tl.maximum(tl.maximum(scales[0], scales[1]), tl.maximum(scales[2], scales[3])), 0)
    bits = tl.minimum(tl.maximum(unit, largest).to(tl.int32, bitcast=True) & EXPONENT_BITS, MAX_UNIT_BITS)
    return bits.to(tl.float32, bitcast=True), (-bits + RECIPROCAL_BITS).to(tl.float32, bitcast=True)


@triton.jit
def _add(keys, weights, sums, keep):
    s0 = matmul(tl.trans(keys[0]), weights[0], sums[0] * keep[None, :])
    s1 = matmul(tl.trans(keys[1]), weights[1], sums[1] * keep[None, :])
    s2 = matmul(tl.trans(keys[2]), weights[2], sums[2] * keep[None, :])
    s3 = matmul(tl.trans(keys[3]), weights[3], sums[3] * keep[None, :])
    return s0, s1, s2, s3


# Sizes change from step to step and single values lie anywhere: one compiled variant, the gate's, serves them all.
@triton.jit(
    do_not_specialize=["num_pages", "num_tokens", "num_heads", "max_pages", "num_splits"],
    do_not_specialize_on_alignment=["block_table", "layer_scale"],
)
def mla_decode_kernel(
    query_latent, query_rope, latents, ropes, scales, latents_stride, ropes_stride, scales_stride, num_pages,
    block_table, num_tokens, positions, layer_scale, softmax_scale, out, lse, num_heads, max_pages, num_splits,
    FORMAT: tl.constexpr, SELECTED: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
    GROUP: tl.constexpr, ROPE: tl.constexpr,
    LATENTS_TOKEN: tl.constexpr, ROPES_TOKEN: tl.constexpr, SCALES_TOKEN: tl.constexpr,
):  # fmt: skip
    """Writes `out` [B, num_splits, heads, 4 * GROUP] and `lse` float32 [B, num_splits, heads].

    `latents`, `ropes`, `scales`: views of one pool, with strides from page to page and from token to token in elements
    of each. SELECTED: `positions` int32 [B, num_tokens] name the tokens, -1 none, and `num_tokens` is a number; else it
    points to int32 [B] and all tokens before it count.
    """
    request, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < num_heads
    if SELECTED:
        count = num_tokens
        positions_row = positions + request * num_tokens
    else:
        # The table bounds what is read, whatever the number says.
        count = tl.minimum(tl.maximum(tl.load(num_tokens + request), 0), max_pages * PAGE)
        positions_row = positions
    table_row = block_table + request * max_pages
    first, last = split_tiles(count, split, num_splits, TILE, PAGE)
    end = tl.minimum(count, last * TILE)

    row = request * num_heads + head
    query = _load_query(query_latent, row, is_head, GROUP)
    rope = load_columns(query_rope, row, is_head, ROPE, 0, ROPE)
    factor = tl.full([HEADS], 1.0, tl.float32) * (softmax_scale * LOG2_E)
    rope_factor = factor
    if FORMAT == FORMAT_BF16:
        query, rope = _to_bf16(query), to_bf16(rope)
    else:
        largest = _largest(query)
        if FORMAT == FORMAT_E4M3:
            largest = tl.maximum(largest, tl.max(tl.abs(rope), 0))
        up, down = query_powers(largest)
        factor = factor * down
        query = _to_f16(query, up)
        if FORMAT == FORMAT_E4M3:
            scale = tl.load(layer_scale)
            factor = factor * scale
            rope = (rope * up[None, :]).to(tl.float16)
        else:
            rope = to_bf16(rope)
        page, place, counts = _places(first, end, table_row, positions_row, max_pages, num_pages, TILE, PAGE, SELECTED)
        keys = _widen(_load_latents(latents, latents_stride, page, place, counts, LATENTS_TOKEN, GROUP, SELECTED))
        if FORMAT == FORMAT_E4M3:
            keys_rope = e4m3_to_f16(load_rows(ropes, ropes_stride, page, place, counts, ROPES_TOKEN, 0, ROPE, SELECTED))

    maximum = tl.full([HEADS], NO_MAXIMUM, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    zero = tl.zeros([GROUP, HEADS], tl.float32)
    sums = (zero, zero, zero, zero)
    unit = tl.full((), MIN_UNIT, tl.float32)
    # Invariant code stays inside: hoisted, the descriptors of the tile in shared memory would fill the registers.
    for tile in tl.range(first, last, disable_licm=True):
        if FORMAT == FORMAT_BF16:
            page, place, now = _places(tile, end, table_row, positions_row, max_pages, num_pages, TILE, PAGE, SELECTED)
            keys = _load_latents(latents, latents_stride, page, place, now, LATENTS_TOKEN, GROUP, SELECTED)
            keys_rope = load_rows(ropes, ropes_stride, page, place, now, ROPES_TOKEN, 0, ROPE, SELECTED)
        else:
            # The next tile's bytes are under way while this one is multiplied. Its float16 values are carried into the
            # next turn, which makes the compiler keep them in shared memory for both products.
            now = counts
            if FORMAT == FORMAT_DS_MLA:
                s0, s1, s2, s3 = _load_scales(scales, scales_stride, page, place, now, SCALES_TOKEN)
                keys_rope = load_rows(ropes, ropes_stride, page, place, now, ROPES_TOKEN, 0, ROPE, SELECTED)
            page, place, counts = _places(
                tile + 1, end, table_row, positions_row, max_pages, num_pages, TILE, PAGE, SELECTED
            )
            bits = _load_latents(latents, latents_stride, page, place, counts, LATENTS_TOKEN, GROUP, SELECTED)
            if FORMAT == FORMAT_E4M3:
                rope_bits = load_rows(ropes, ropes_stride, page, place, counts, ROPES_TOKEN, 0, ROPE, SELECTED)

        none = tl.zeros([TILE, HEADS], tl.float32)
        if FORMAT == FORMAT_DS_MLA:
            scores = matmul(keys[0], query[0], none) * s0[:, None]
            scores += matmul(keys[1], query[1], none) * s1[:, None]
            scores += matmul(keys[2], query[2], none) * s2[:, None]
            scores += matmul(keys[3], query[3], none) * s3[:, None]
            scores = scores * factor[None, :] + matmul(keys_rope, rope, none) * rope_factor[None, :]
        else:
            scores = matmul(keys[0], query[0], none)
            scores = matmul(keys[1], query[1], scores)
            scores = matmul(keys[2], query[2], scores)
            scores = matmul(keys[3], query[3], scores)
            scores = matmul(keys_rope, rope, scores) * factor[None, :]
        scores = tl.where(now[:, None], scores, float("-inf"))
        probability, keep, maximum, total = softmax_step(scores, maximum, total)

        if FORMAT == FORMAT_DS_MLA:
            new_unit, inverse = _new_unit(unit, (s0, s1, s2, s3))
            keep = keep * (unit * inverse)
            unit = new_unit
            w0 = (probability * (s0 * inverse)[:, None]).to(tl.float16)
            w1 = (probability * (s1 * inverse)[:, None]).to(tl.float16)
            w2 = (probability * (s2 * inverse)[:, None]).to(tl.float16)
            w3 = (probability * (s3 * inverse)[:, None]).to(tl.float16)
            sums = _add(keys, (w0, w1, w2, w3), sums, keep)
        else:
            if FORMAT == FORMAT_BF16:
                weights = to_bf16(probability)
            else:
                weights = probability.to(tl.float16)
            sums = _add(keys, (weights, weights, weights, weights), sums, keep)
        if FORMAT != FORMAT_BF16:
            keys = _widen(bits)
        if FORMAT == FORMAT_E4M3:
            keys_rope = e4m3_to_f16(rope_bits)

    inverse_total = reciprocal(total)[None, :]
    # Last, so that no product on the way is smaller than both.
    if FORMAT == FORMAT_BF16:
        value_scale = 1.0
    elif FORMAT == FORMAT_E4M3:
        value_scale = scale
    else:
        value_scale = unit
    row = (request * num_splits + split) * num_heads + head
    store_columns(out, row, is_head, sums[0] * inverse_total * value_scale, 4 * GROUP, 0, GROUP)
    store_columns(out, row, is_head, sums[1] * inverse_total * value_scale, 4 * GROUP, GROUP, GROUP)
    store_columns(out, row, is_head, sums[2] * inverse_total * value_scale, 4 * GROUP, 2 * GROUP, GROUP)
    store_columns(out, row, is_head, sums[3] * inverse_total * value_scale, 4 * GROUP, 3 * GROUP, GROUP)
    tl.store(lse + row, log_sum_exp(maximum, total * 2.0**-WEIGHT_EXPONENT), mask=is_head)
