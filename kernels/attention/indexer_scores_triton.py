"""DSA indexer scores on a GPU: a program scores a run of one request's pages."""

# Triton compiles these from the types it is called with.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from memopt.kernels.attention.decode_math_triton import e4m3_to_f16, query_powers
from memopt.kernels.attention.page_tiles_triton import load_rows, run_places
from memopt.kernels.device.current_device import on_tensors_device
from memopt.kernels.device.triton_math import matmul
from memopt.kernels.kv_cache.kv_format import indexer_views
from memopt.kernels.layout import INDEXER_KEY_SIZE, PAGE_TOKENS

NUM_WARPS = 4
NUM_STAGES = 2
# Pages a program scores: its query is loaded once for all of them.
RUN_PAGES = 8


# Sizes change from step to step and single values lie anywhere: one compiled variant, the gate's, serves them all.
@triton.jit(
    do_not_specialize=["num_pages", "num_heads", "max_pages"],
    do_not_specialize_on_alignment=["block_table", "num_tokens"],
)
def indexer_scores_kernel(
    query, head_weights, keys, key_scales, keys_stride, scales_stride, num_pages, block_table, num_tokens, scores,
    num_heads, max_pages,
    IS_FP8: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, PAGE: tl.constexpr, RUN_PAGES: tl.constexpr,
):  # fmt: skip
    """Writes `scores` float32 [B, max_pages * PAGE]; -inf where a token does not count.

    `query` [B, heads, KEY]: e4m3 bytes (IS_FP8), bfloat16 or float32. HEADS: a power of two, at least `num_heads`.
    """
    request = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * RUN_PAGES
    last = tl.minimum(first + RUN_PAGES, max_pages)
    end = tl.minimum(tl.load(num_tokens + request), last * PAGE)
    table_row = block_table + request * max_pages

    head, element = tl.arange(0, HEADS), tl.arange(0, KEY)
    row = request * num_heads + head
    is_head = head < num_heads
    weights = tl.load(head_weights + row, mask=is_head, other=0.0)
    if IS_FP8:
        q = e4m3_to_f16(tl.load(query + row[None, :] * KEY + element[:, None], mask=is_head[None, :], other=0))
    else:
        q = tl.load(query + row[None, :] * KEY + element[:, None], mask=is_head[None, :], other=0.0).to(tl.float32)
        up, down = query_powers(tl.max(tl.abs(q), 0))
        q = (q * up[None, :]).to(tl.float16)
        # Powers of two pass through relu: relu(x * up) * down = relu(x).
        weights = weights * down

    page, place, counts = run_places(first, end, table_row, num_pages, PAGE, PAGE)
    k = e4m3_to_f16(load_rows(keys, keys_stride, page, place, counts, KEY, 0, KEY, False))
    for tile in tl.range(first, last, disable_licm=True):
        # As in mla_decode_kernel: the next page's bytes are under way, its float16 values are carried.
        now = counts
        scale = tl.load(key_scales + page * scales_stride + place, mask=now, other=0.0)
        page, place, counts = run_places(tile + 1, end, table_row, num_pages, PAGE, PAGE)
        bits = load_rows(keys, keys_stride, page, place, counts, KEY, 0, KEY, False)
        products = matmul(k, q, tl.zeros([PAGE, HEADS], tl.float32))
        # Not maximum(x, 0): NaN must stay NaN.
        positive = tl.where(products <= 0.0, 0.0, products)
        score = tl.sum(positive * weights[None, :], 1) * scale
        token = tile * PAGE + tl.arange(0, PAGE)
        tl.store(scores + request * max_pages * PAGE + token, tl.where(now, score, float("-inf")))
        k = e4m3_to_f16(bits)


@on_tensors_device
def indexer_scores(
    query: Tensor,
    head_weights: Tensor,
    pool: Tensor,
    block_table: Tensor,
    num_tokens: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Arguments as for `indexer_scores.indexer_scores`."""
    num_requests, num_heads, _ = query.shape
    max_pages = block_table.shape[1]
    shape = (num_requests, max_pages * PAGE_TOKENS)
    scores = torch.empty(shape, dtype=torch.float32, device=query.device) if out is None else out
    if scores.numel() == 0:
        return scores
    is_fp8 = query.dtype == torch.float8_e4m3fn
    views = indexer_views(pool)
    indexer_scores_kernel[(num_requests, -(-max_pages // RUN_PAGES))](
        query.view(torch.uint8) if is_fp8 else query, head_weights, views.keys, views.scales, views.keys.stride(0),
        views.scales.stride(0), pool.shape[0], block_table, num_tokens, scores, num_heads, max_pages,
        IS_FP8=is_fp8, HEADS=max(16, triton.next_power_of_2(num_heads)), KEY=INDEXER_KEY_SIZE, PAGE=PAGE_TOKENS,
        RUN_PAGES=RUN_PAGES, num_warps=NUM_WARPS, num_stages=NUM_STAGES, enable_fp_fusion=False,
    )  # fmt: skip
    return scores
