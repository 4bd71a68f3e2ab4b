"""Attention of a prompt's chunk over all of the sequence so far, keys and values expanded: checks, then the path.

The queries are the last tokens of what is in the cache; each attends to itself and to what stands before it. On a GPU
this is torch's scaled_dot_product_attention, not a kernel of memopt's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.errors import ShapeError, UsageError
from memopt.kernels.attention import prefill_attention_cpu
from memopt.kernels.attention.prefill_tiles import ReadTile
from memopt.kernels.device.tensor_checks import require_tensor


def prefill_attention(
    query: Tensor,
    read_tile: ReadTile,
    first_position: int,
    *,
    num_kv_heads: int,
    value_size: int,
    softmax_scale: float,
    selected: Tensor | None = None,
) -> Tensor:
    """Output [R, Hq, V] of queries [R, Hq, D] at positions first_position to first_position + R - 1, in their type.

    `query`: bfloat16 or float32, contiguous; query head h reads KV head h * num_kv_heads // Hq. `read_tile`:
    prefill_tiles.py; it may compute what it returns. `selected` int32 [R, k]: positions that a query attends to, those
    past its own and negative ones not counting; None: all. Softmax and sums are float32. On the CPU a query's bits
    depend on its own sequence and position alone, not on R or on where its chunk begins, if those of keys and values do
    not; a query with nothing selected gives zeros. Raises ShapeError or UsageError for what does not fit.
    """
    require_tensor("query", query, (None, None, None), torch.bfloat16, torch.float32)
    num_rows, num_heads, _ = query.shape
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ShapeError(f"query {list(query.shape)}: its heads are not a multiple of {num_kv_heads} KV heads")
    if first_position < 0:
        raise UsageError(f"a chunk begins at position {first_position}")
    if selected is not None:
        require_tensor("selected", selected, (num_rows, None), torch.int32, like=query)
    if num_rows == 0:
        return query.new_zeros((0, num_heads, value_size))
    if query.is_cuda:
        from memopt.kernels.attention import prefill_attention_device

        run = prefill_attention_device.prefill_attention
    else:
        run = prefill_attention_cpu.prefill_attention
    return run(
        query, read_tile, first_position,
        num_kv_heads=num_kv_heads, value_size=value_size, softmax_scale=softmax_scale, selected=selected,
    )  # fmt: skip
