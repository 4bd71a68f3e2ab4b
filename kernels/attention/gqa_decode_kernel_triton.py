"""The kernel of GQA decode: one request, one KV head's group of query heads and one split a program."""

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
from memopt.kernels.attention.page_tiles_triton import load_rows, long_run_places
from memopt.kernels.device.triton_math import matmul, to_bf16


# Sizes change from step to step and single values lie anywhere: one compiled variant, the gate's, serves them all.
@triton.jit(
    do_not_specialize=["num_pages", "num_heads", "max_pages", "num_splits"],
    do_not_specialize_on_alignment=["block_table", "num_tokens", "k_scale", "v_scale"],
)
def gqa_decode_kernel(
    query, keys, values, keys_stride, values_stride, num_pages, block_table, num_tokens, k_scale, v_scale,
    softmax_scale, out, lse, num_heads, max_pages, num_splits,
    IS_FP8: tl.constexpr, KV_HEADS: tl.constexpr, GROUP_HEADS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    TILE: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Writes `out` [B, num_splits, heads, DIM] and `lse` float32 [B, num_splits, heads].

    `keys`, `values`: pools [pages, PAGE, KV_HEADS, DIM], with elements from page to page. A KV head serves GROUP_HEADS
    query heads, of which a program takes HEADS.
    """
    request, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    tiles_a_group: tl.constexpr = (GROUP_HEADS + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // tiles_a_group
    in_group = tl.program_id(1) % tiles_a_group * HEADS + tl.arange(0, HEADS)
    head, is_head = kv_head * GROUP_HEADS + in_group, in_group < GROUP_HEADS
    # The table bounds what is read, whatever the number says.
    count = tl.minimum(tl.maximum(tl.load(num_tokens + request), 0), max_pages * PAGE)
    table_row = block_table + request * max_pages
    first, last = split_tiles(count, split, num_splits, TILE, TILE)
    end = tl.minimum(count, last * TILE)
    keys, values = keys + kv_head * DIM, values + kv_head * DIM

    row = request * num_heads + head
    q = load_columns(query, row, is_head, DIM, 0, DIM)
    factor = tl.full([HEADS], 1.0, tl.float32) * (softmax_scale * LOG2_E)
    if IS_FP8:
        up, down = query_powers(tl.max(tl.abs(q), 0))
        q = (q * up[None, :]).to(tl.float16)
        factor = factor * down * tl.load(k_scale + kv_head)
        page, place, counts = long_run_places(first, end, table_row, num_pages, TILE, PAGE)
        k = e4m3_to_f16(load_rows(keys, keys_stride, page, place, counts, KV_HEADS * DIM, 0, DIM, True))
        v = e4m3_to_f16(load_rows(values, values_stride, page, place, counts, KV_HEADS * DIM, 0, DIM, True))
    else:
        q = to_bf16(q)

    maximum = tl.full([HEADS], NO_MAXIMUM, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    sums = tl.zeros([DIM, HEADS], tl.float32)
    for tile in tl.range(first, last, disable_licm=True):
        if IS_FP8:
            # As in mla_decode_kernel: the next tile's bytes are under way, its float16 values are carried.
            now = counts
            page, place, counts = long_run_places(tile + 1, end, table_row, num_pages, TILE, PAGE)
            k_bits = load_rows(keys, keys_stride, page, place, counts, KV_HEADS * DIM, 0, DIM, True)
            v_bits = load_rows(values, values_stride, page, place, counts, KV_HEADS * DIM, 0, DIM, True)
        else:
            page, place, now = long_run_places(tile, end, table_row, num_pages, TILE, PAGE)
            k = load_rows(keys, keys_stride, page, place, now, KV_HEADS * DIM, 0, DIM, True)
            v = load_rows(values, values_stride, page, place, now, KV_HEADS * DIM, 0, DIM, True)
        scores = matmul(k, q, tl.zeros([TILE, HEADS], tl.float32)) * factor[None, :]
        scores = tl.where(now[:, None], scores, float("-inf"))
        probability, keep, maximum, total = softmax_step(scores, maximum, total)
        if IS_FP8:
            weights = probability.to(tl.float16)
        else:
            weights = to_bf16(probability)
        sums = matmul(tl.trans(v), weights, sums * keep[None, :])
        if IS_FP8:
            k, v = e4m3_to_f16(k_bits), e4m3_to_f16(v_bits)

    result = sums * reciprocal(total)[None, :]
    if IS_FP8:
        result = result * tl.load(v_scale + kv_head)
    row = (request * num_splits + split) * num_heads + head
    store_columns(out, row, is_head, result, DIM, 0, DIM)
    tl.store(lse + row, log_sum_exp(maximum, total * 2.0**-WEIGHT_EXPONENT), mask=is_head)
