"""MLA of single queries over paged keys, for numba: a page's worth of tokens at a time, online softmax.

A request is computed alone, in an order that its own number of tokens decides: its bits do not depend on the batch.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from memopt.kernels.layout import PAGE_TOKENS
from memopt.kernels.rows.row_values_cpu import exp_float32, narrow, widen

_SUMS = {"reassoc", "contract"}
_ZERO, _LOWEST = np.float32(0), np.float32(-np.inf)


@njit(nogil=True, error_model="numpy", fastmath=_SUMS)
def _score(query, keys, num_tokens, scores):
    """scores [H, T] = query [H, D] . keys [T, D], four heads and two keys to a pass."""
    num_heads, size = query.shape
    whole, pairs = num_heads - num_heads % 4, num_tokens - num_tokens % 2
    for h in range(0, whole, 4):
        q0, q1, q2, q3 = query[h], query[h + 1], query[h + 2], query[h + 3]
        for t in range(0, pairs, 2):
            k0, k1 = keys[t], keys[t + 1]
            s00, s10, s20, s30, s01, s11, s21, s31 = _ZERO, _ZERO, _ZERO, _ZERO, _ZERO, _ZERO, _ZERO, _ZERO
            for d in range(size):
                s00 += q0[d] * k0[d]
                s10 += q1[d] * k0[d]
                s20 += q2[d] * k0[d]
                s30 += q3[d] * k0[d]
                s01 += q0[d] * k1[d]
                s11 += q1[d] * k1[d]
                s21 += q2[d] * k1[d]
                s31 += q3[d] * k1[d]
            scores[h, t], scores[h + 1, t], scores[h + 2, t], scores[h + 3, t] = s00, s10, s20, s30
            t += 1
            scores[h, t], scores[h + 1, t], scores[h + 2, t], scores[h + 3, t] = s01, s11, s21, s31
        for t in range(pairs, num_tokens):
            key = keys[t]
            s0, s1, s2, s3 = _ZERO, _ZERO, _ZERO, _ZERO
            for d in range(size):
                s0 += q0[d] * key[d]
                s1 += q1[d] * key[d]
                s2 += q2[d] * key[d]
                s3 += q3[d] * key[d]
            scores[h, t], scores[h + 1, t], scores[h + 2, t], scores[h + 3, t] = s0, s1, s2, s3
    for h in range(whole, num_heads):
        for t in range(num_tokens):
            total = _ZERO
            for d in range(size):
                total += query[h, d] * keys[t, d]
            scores[h, t] = total


@njit(nogil=True, error_model="numpy", fastmath=_SUMS)
def _add_values_of_four(probability, keys, num_tokens, sums):
    """sums [4, V] += probability [4, T] @ keys [T, V]: four heads and four tokens to a pass, one read of a key."""
    sums0, sums1, sums2, sums3 = sums[0], sums[1], sums[2], sums[3]
    p, q, r, s = probability[0], probability[1], probability[2], probability[3]
    whole = num_tokens - num_tokens % 4
    for t in range(0, whole, 4):
        p0, p1, p2, p3 = p[t], p[t + 1], p[t + 2], p[t + 3]
        q0, q1, q2, q3 = q[t], q[t + 1], q[t + 2], q[t + 3]
        r0, r1, r2, r3 = r[t], r[t + 1], r[t + 2], r[t + 3]
        s0, s1, s2, s3 = s[t], s[t + 1], s[t + 2], s[t + 3]
        k0, k1, k2, k3 = keys[t], keys[t + 1], keys[t + 2], keys[t + 3]
        for d in range(sums.shape[1]):
            v0, v1, v2, v3 = k0[d], k1[d], k2[d], k3[d]
            sums0[d] += (p0 * v0 + p1 * v1) + (p2 * v2 + p3 * v3)
            sums1[d] += (q0 * v0 + q1 * v1) + (q2 * v2 + q3 * v3)
            sums2[d] += (r0 * v0 + r1 * v1) + (r2 * v2 + r3 * v3)
            sums3[d] += (s0 * v0 + s1 * v1) + (s2 * v2 + s3 * v3)
    for t in range(whole, num_tokens):
        p0, q0, r0, s0, k0 = p[t], q[t], r[t], s[t], keys[t]
        for d in range(sums.shape[1]):
            value = k0[d]
            sums0[d] += p0 * value
            sums1[d] += q0 * value
            sums2[d] += r0 * value
            sums3[d] += s0 * value


@njit(nogil=True, error_model="numpy", fastmath=_SUMS)
def _add_values(probability, keys, num_tokens, sums):
    """sums [V] += probability [T] @ keys [T, V], four tokens to a pass over the sums."""
    whole = num_tokens - num_tokens % 4
    for t in range(0, whole, 4):
        p0, p1, p2, p3 = probability[t], probability[t + 1], probability[t + 2], probability[t + 3]
        k0, k1, k2, k3 = keys[t], keys[t + 1], keys[t + 2], keys[t + 3]
        for d in range(sums.shape[0]):
            sums[d] += (p0 * k0[d] + p1 * k1[d]) + (p2 * k2[d] + p3 * k3[d])
    for t in range(whole, num_tokens):
        p0, k0 = probability[t], keys[t]
        for d in range(sums.shape[0]):
            sums[d] += p0 * k0[d]


@njit(nogil=True, error_model="numpy")
def _soften(scores, num_tokens, state, head):
    """Scores [T] to probabilities under the head's new maximum; returns what the sums so far are multiplied by."""
    largest = state[0, head]
    for t in range(num_tokens):
        # A NaN stays the largest, so that it reaches the result.
        largest = scores[t] if not scores[t] <= largest else largest
    keep = exp_float32(state[0, head] - largest)
    total = _ZERO
    for t in range(num_tokens):
        scores[t] = exp_float32(scores[t] - largest)
    for t in range(num_tokens):
        total += scores[t]
    state[1, head] = state[1, head] * keep + total
    state[0, head] = largest
    return keep


@njit(nogil=True, error_model="numpy")
def _read(latents, ropes, scales, rope_scale, places, slots, num_tokens, latent_size, keys):
    """Keys [T, L + R] float32 of slots; the arrays and `places` as for `attend_rows`."""
    page_stride, token_size, rope_page, rope_token, rope_offset, scale_page, scale_token, scale_offset, group = places
    for t in range(num_tokens):
        page, position = slots[t] // PAGE_TOKENS, slots[t] % PAGE_TOKENS
        start = page * page_stride + position * token_size
        scale_start = page * scale_page + position * scale_token + scale_offset
        for first in range(0, latent_size, group):
            after = min(first + group, latent_size)
            source, target = latents[start + first : start + after], keys[t, first:after]
            scale = scales[scale_start + first // group]
            for d in range(after - first):
                target[d] = widen(source[d]) * scale
        start = page * rope_page + position * rope_token + rope_offset
        target = keys[t, latent_size:]
        source = ropes[start : start + target.shape[0]]
        for d in range(target.shape[0]):
            target[d] = widen(source[d]) * rope_scale


@njit(nogil=True, error_model="numpy")
def _slots_of(table, num_tokens, positions, num_pages, slots):
    """Fills `slots` of a request's tokens, or of its positions; their number, or -1 for a page that is not there."""
    count = 0
    for place in range(num_tokens if positions.shape[0] == 0 else positions.shape[0]):
        position = place if positions.shape[0] == 0 else positions[place]
        if position < 0:
            continue
        column = position // PAGE_TOKENS
        if column >= table.shape[0] or table[column] < 0 or table[column] >= num_pages:
            return -1
        slots[count] = np.int64(table[column]) * PAGE_TOKENS + position % PAGE_TOKENS
        count += 1
    return count


@njit(nogil=True, error_model="numpy")
def attend_rows(
    query_latent, query_rope, latents, ropes, scales, rope_scale, places, num_pages, table, num_tokens, positions,
    softmax_scale, output, log_sum_exp,
):  # fmt: skip
    """Output [B, H, L] and log_sum_exp [B, H] of queries [B, H, L] and [B, H, R]; -1, or a request with a bad page.

    `latents`, `ropes`: a pool's elements in one line each (BF16 bits, float32 or e4m3 codes), `scales` float32 of runs
    of `group` latent elements; `places`: of each, elements from page to page, from token to token and before the first,
    which is 0 for latents, then `group`. `table` int32 [B, P]; `num_tokens` int32 [B]; `positions` int32 [B, k], k = 0
    for all tokens.
    """
    num_heads, latent_size = query_latent.shape[1:]
    rope_size = query_rope.shape[2]
    slots = np.empty(table.shape[1] * PAGE_TOKENS if positions.shape[1] == 0 else positions.shape[1], np.int64)
    keys = np.empty((PAGE_TOKENS, latent_size + rope_size), np.float32)
    query = np.empty((num_heads, latent_size + rope_size), np.float32)
    scores = np.empty((num_heads, PAGE_TOKENS), np.float32)
    sums = np.empty((num_heads, latent_size), np.float32)
    state = np.empty((2, num_heads), np.float32)
    for b in range(query_latent.shape[0]):
        count = _slots_of(table[b], num_tokens[b], positions[b], num_pages, slots)
        if count < 0:
            return b
        for h in range(num_heads):
            for d in range(latent_size):
                query[h, d] = widen(query_latent[b, h, d]) * softmax_scale
            for d in range(rope_size):
                query[h, latent_size + d] = widen(query_rope[b, h, d]) * softmax_scale
        sums[:] = _ZERO
        state[0], state[1] = _LOWEST, _ZERO
        for start in range(0, count, PAGE_TOKENS):
            num_here = min(PAGE_TOKENS, count - start)
            _read(latents, ropes, scales, rope_scale, places, slots[start:], num_here, latent_size, keys)
            _score(query, keys, num_here, scores)
            for h in range(num_heads):
                keep = _soften(scores[h], num_here, state, h)
                if start > 0:
                    for d in range(latent_size):
                        sums[h, d] *= keep
            whole = num_heads - num_heads % 4
            for h in range(0, whole, 4):
                _add_values_of_four(scores[h : h + 4], keys, num_here, sums[h : h + 4])
            for h in range(whole, num_heads):
                _add_values(scores[h], keys, num_here, sums[h])
        for h in range(num_heads):
            total = state[1, h]
            for d in range(latent_size):
                output[b, h, d] = narrow(sums[h, d] / total if count > 0 else _ZERO, output)
            log_sum_exp[b, h] = state[0, h] + np.log(total) if count > 0 else _LOWEST
    return -1
