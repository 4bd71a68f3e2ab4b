"""A mixture-of-experts layer's bookkeeping for numba: a router's choices, tokens in the order of experts, the sum."""

from __future__ import annotations

import numpy as np
from numba import njit

from memopt.kernels.rows.row_values_cpu import exp_float32, narrow, widen

_ZERO, _ONE, _LOWEST = np.float32(0), np.float32(1), np.float32(-np.inf)


@njit(nogil=True, error_model="numpy")
def _mask_groups(choice, num_groups, groups_per_token, group_scores):
    """-inf for experts outside the best groups; a group is as good as the sum of its two best experts."""
    size = choice.shape[0] // num_groups
    for g in range(num_groups):
        first, second = _LOWEST, _LOWEST
        for value in choice[g * size : (g + 1) * size]:
            if value > first:
                first, second = value, first
            elif value > second:
                second = value
        group_scores[g] = first + second
    is_kept = np.zeros(num_groups, np.bool_)
    for _ in range(groups_per_token):
        best = -1
        for g in range(num_groups):
            if not is_kept[g] and (best < 0 or group_scores[g] > group_scores[best]):
                best = g
        is_kept[best] = True
    for g in range(num_groups):
        if not is_kept[g]:
            choice[g * size : (g + 1) * size] = _LOWEST


@njit(nogil=True, error_model="numpy")
def choose_experts(
    products, bias, num_groups, groups_per_token, is_renormalized, smallest_sum, factor, ids, weights
):  # fmt: skip
    """Fills ids int64 [T, k], ascending, and weights float32 [T, k] for a router's products float32 [T, E].

    Of equal choices the lower expert wins; a NaN is never the better one.
    """
    num_experts, num_choices = products.shape[1], ids.shape[1]
    scores, choice = np.empty(num_experts, np.float32), np.empty(num_experts, np.float32)
    is_chosen, group_scores = np.empty(num_experts, np.bool_), np.empty(num_groups, np.float32)
    for t in range(products.shape[0]):
        for e in range(num_experts):
            scores[e] = np.float32(_ONE / np.float32(_ONE + exp_float32(-products[t, e])))
        for e in range(num_experts):
            choice[e] = scores[e] + bias[e]
        if groups_per_token < num_groups:
            _mask_groups(choice, num_groups, groups_per_token, group_scores)
        is_chosen[:] = False
        for _ in range(num_choices):
            best = -1
            for e in range(num_experts):
                if not is_chosen[e] and (best < 0 or choice[e] > choice[best]):
                    best = e
            is_chosen[best] = True
        place, total = 0, _ZERO
        for e in range(num_experts):
            if is_chosen[e]:
                ids[t, place], weights[t, place] = e, scores[e]
                total += scores[e]
                place += 1
        divisor = np.float32(total + smallest_sum) if is_renormalized else _ONE
        for place in range(num_choices):
            weights[t, place] = np.float32(np.float32(weights[t, place] / divisor) * factor)


@njit(nogil=True, error_model="numpy")
def order_choices(x, ids, num_experts, starts, places, rows):
    """Choices [T, k] in the order of experts, then of tokens: expert e's are starts[e] to starts[e + 1].

    `starts` int64 [num_experts + 1]; `places` int64 [T, k]: where a choice stands in that order, -1 for an id outside 0
    to num_experts - 1; `rows` [T * k, H]: the token's row of x [T, H] for each choice in that order.
    """
    starts[:] = 0
    for t in range(ids.shape[0]):
        for j in range(ids.shape[1]):
            if 0 <= ids[t, j] < num_experts:
                starts[ids[t, j] + 1] += 1
    for e in range(num_experts):
        starts[e + 1] += starts[e]
    for t in range(ids.shape[0]):
        for j in range(ids.shape[1]):
            places[t, j] = -1
            if 0 <= ids[t, j] < num_experts:
                places[t, j] = starts[ids[t, j]]
                source, target = x[t], rows[places[t, j]]
                for i in range(target.shape[0]):
                    target[i] = source[i]
                starts[ids[t, j]] += 1
    for e in range(num_experts, 0, -1):
        starts[e] = starts[e - 1]
    starts[0] = 0


@njit(nogil=True, error_model="numpy")
def add_choices(results, places, weights, out):
    """out [T, H] = sum over j of weights [T, k] * results [., H] at places [T, k], in the order of j, in float32."""
    total = np.empty(out.shape[1], np.float32)
    for t in range(out.shape[0]):
        total[:] = _ZERO
        for j in range(places.shape[1]):
            if places[t, j] >= 0:
                weight, result = weights[t, j], results[places[t, j]]
                for i in range(total.shape[0]):
                    total[i] += np.float32(weight * widen(result[i]))
        for i in range(total.shape[0]):
            out[t, i] = narrow(total[i], out)
