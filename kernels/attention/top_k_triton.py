"""Deterministic top-k on a GPU: a radix select over the scores' bits, then a compaction in the order of positions.

Three passes count one digit each of the scores' keys and so find the key of the k-th score; a fourth counts, chunk by
chunk, the keys above it and equal to it; a fifth writes positions at places that these counts fix. Only integers are
added, so the result does not depend on the order in which programs run.
"""

# Triton compiles these from the types it is called with.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from memopt.kernels.device.current_device import on_tensors_device
from memopt.kernels.layout import F32_BITS, F32_SIGN_MASK

NUM_WARPS = 8
# Scores a program handles.
CHUNK = 4096
# A key has 32 bits: digits of 11, 11 and 10, the last one counted in 2048 bins as well.
DIGIT_BITS = 11
BINS = 1 << DIGIT_BITS
PASSES = 3
LAST_DIGIT_BITS = F32_BITS - (PASSES - 1) * DIGIT_BITS
_BINS, _PASSES = tl.constexpr(BINS), tl.constexpr(PASSES)
_DIGIT_BITS, _LAST_BITS = tl.constexpr(DIGIT_BITS), tl.constexpr(LAST_DIGIT_BITS)
# Bits below the digit of pass 0.
_FIRST_SHIFT = tl.constexpr(F32_BITS - DIGIT_BITS)
_LAST_MASK = tl.constexpr((1 << LAST_DIGIT_BITS) - 1)
_SIGN = tl.constexpr(F32_SIGN_MASK)


@triton.jit
def _load_keys(scores_row, first, count, CHUNK: tl.constexpr):
    """Keys uint32 [CHUNK] in the order of the scores, and which are among the first `count`. As `order_keys`."""
    token = first + tl.arange(0, CHUNK)
    counts = token < count
    score = tl.load(scores_row + token, mask=counts, other=0.0)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)
    key = tl.where(bits >= _SIGN, ~bits, bits | _SIGN)
    return tl.where(score != score, 0, key), counts


@triton.jit
def _find_digit(histogram, wanted):
    """Digit of the `wanted`-th largest key among those counted, and how many of that digit are wanted."""
    bins = tl.load(histogram + tl.arange(0, _BINS))
    at_least = tl.cumsum(bins, 0, reverse=True)
    digit = tl.maximum(tl.sum((at_least >= wanted).to(tl.int32), 0) - 1, 0)
    above = tl.sum(tl.where(tl.arange(0, _BINS) > digit, bins, 0), 0)
    return digit.to(tl.uint32), wanted - above


@triton.jit
def _find_prefix(histograms_row, wanted, PASSES_DONE: tl.constexpr):
    """The first digits of the k-th largest key as a number, and how many keys that start with them are wanted."""
    prefix = (wanted * 0).to(tl.uint32)
    for done in tl.static_range(PASSES_DONE):
        digit, wanted = _find_digit(histograms_row + done * _BINS, wanted)
        if done == _PASSES - 1:
            prefix = (prefix << _LAST_BITS) | digit
        else:
            prefix = (prefix << _DIGIT_BITS) | digit
    return prefix, wanted


@triton.jit
def _bounds(num_tokens, request, max_tokens, k):
    count = tl.minimum(tl.maximum(tl.load(num_tokens + request), 0), max_tokens)
    return count, tl.minimum(count, k)


@triton.jit(do_not_specialize=["k"], do_not_specialize_on_alignment=["num_tokens"])
def count_digits_kernel(scores, num_tokens, histograms, max_tokens, k, PASS: tl.constexpr, CHUNK: tl.constexpr):
    """Adds to `histograms` int32 [B, 3, BINS] of pass PASS the digits of a chunk's keys that share the prefix."""
    request, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count, wanted = _bounds(num_tokens, request, max_tokens, k)
    if chunk * CHUNK >= count:
        return
    row = histograms + request * (_PASSES * _BINS)
    prefix, wanted = _find_prefix(row, wanted, PASS)
    key, counts = _load_keys(scores + request * max_tokens, chunk * CHUNK, count, CHUNK)
    if PASS == 0:
        digit = key >> _FIRST_SHIFT
    elif PASS == 1:
        digit = (key >> _LAST_BITS) & (_BINS - 1)
        counts = counts & (key >> _FIRST_SHIFT == prefix)
    else:
        digit = key & _LAST_MASK
        counts = counts & (key >> _LAST_BITS == prefix)
    found = tl.histogram(digit.to(tl.int32), _BINS, mask=counts)
    bins = tl.arange(0, _BINS)
    tl.atomic_add(row + PASS * _BINS + bins, found, mask=found > 0, sem="relaxed")


@triton.jit(do_not_specialize=["k"], do_not_specialize_on_alignment=["num_tokens"])
def count_chunks_kernel(scores, num_tokens, histograms, chunk_counts, max_tokens, k, CHUNK: tl.constexpr):
    """Writes `chunk_counts` int32 [B, 2, chunks]: keys of a chunk above the k-th key, and equal to it."""
    request, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    count, wanted = _bounds(num_tokens, request, max_tokens, k)
    threshold, _ = _find_prefix(histograms + request * (_PASSES * _BINS), wanted, _PASSES)
    key, counts = _load_keys(scores + request * max_tokens, chunk * CHUNK, count, CHUNK)
    above = tl.sum((counts & (key > threshold)).to(tl.int32), 0)
    equal = tl.sum((counts & (key == threshold)).to(tl.int32), 0)
    tl.store(chunk_counts + request * 2 * chunks + chunk, above)
    tl.store(chunk_counts + (request * 2 + 1) * chunks + chunk, equal)


@triton.jit(do_not_specialize=["k"], do_not_specialize_on_alignment=["num_tokens"])
def write_positions_kernel(
    scores, num_tokens, histograms, chunk_counts, positions, max_tokens, k, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    PADDED_K: tl.constexpr,
):  # fmt: skip
    """Writes `positions` int32 [B, k]. CHUNKS: a power of two, at least the number of chunks; PADDED_K of k."""
    request, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    count, wanted = _bounds(num_tokens, request, max_tokens, k)
    threshold, wanted_equal = _find_prefix(histograms + request * (_PASSES * _BINS), wanted, _PASSES)
    before = tl.arange(0, CHUNKS)
    above_row = chunk_counts + request * 2 * chunks
    above_before = tl.sum(tl.load(above_row + before, mask=before < chunk, other=0), 0)
    equal_before = tl.sum(tl.load(above_row + chunks + before, mask=before < chunk, other=0), 0)

    key, counts = _load_keys(scores + request * max_tokens, chunk * CHUNK, count, CHUNK)
    is_equal = (counts & (key == threshold)).to(tl.int32)
    rank = equal_before + tl.cumsum(is_equal, 0) - is_equal
    is_chosen = (counts & ((key > threshold) | ((is_equal == 1) & (rank < wanted_equal)))).to(tl.int32)
    place = above_before + tl.minimum(equal_before, wanted_equal) + tl.cumsum(is_chosen, 0) - 1
    row = positions + request * k
    tl.store(row + place, chunk * CHUNK + tl.arange(0, CHUNK), mask=is_chosen == 1)
    if chunk == 0:
        index = tl.arange(0, PADDED_K)
        tl.store(row + index, index * 0 - 1, mask=(index >= wanted) & (index < k))


@on_tensors_device
def top_k(scores: Tensor, num_tokens: Tensor, k: int, out: Tensor | None = None) -> Tensor:
    """Arguments as for `top_k.top_k`."""
    num_requests, max_tokens = scores.shape
    positions = torch.empty((num_requests, k), dtype=torch.int32, device=scores.device) if out is None else out
    if num_requests == 0:
        return positions
    chunks = max(1, -(-max_tokens // CHUNK))
    histograms = torch.zeros((num_requests, PASSES, BINS), dtype=torch.int32, device=scores.device)
    chunk_counts = torch.empty((num_requests, 2, chunks), dtype=torch.int32, device=scores.device)
    grid = (num_requests, chunks)
    for digit in range(PASSES):
        count_digits_kernel[grid](
            scores, num_tokens, histograms, max_tokens, k, PASS=digit, CHUNK=CHUNK, num_warps=NUM_WARPS
        )
    count_chunks_kernel[grid](
        scores, num_tokens, histograms, chunk_counts, max_tokens, k, CHUNK=CHUNK, num_warps=NUM_WARPS
    )
    write_positions_kernel[grid](
        scores, num_tokens, histograms, chunk_counts, positions, max_tokens, k, CHUNK=CHUNK,
        CHUNKS=triton.next_power_of_2(chunks), PADDED_K=triton.next_power_of_2(k), num_warps=NUM_WARPS,
    )  # fmt: skip
    return positions
