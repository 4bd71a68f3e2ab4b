"""Attention of a prompt's chunk: plain torch, written to be read. It defines the result."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.attention.prefill_mask import causal_mask, selection_mask
from memopt.kernels.attention.prefill_tiles import ReadTile
from memopt.kernels.attention.softmax_reference import compute_dtype


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
    """Arguments as for `prefill_attention.prefill_attention`; queries may be float64 as well."""
    dtype = compute_dtype(query)
    num_rows, num_heads, _ = query.shape
    num_keys = first_position + num_rows
    keys, values = (part.to(dtype) for part in read_tile(0, num_keys))
    is_kept = causal_mask(torch.arange(first_position, num_keys, device=query.device), 0, num_keys)
    if selected is not None:
        is_kept &= selection_mask(selected, num_keys)
    output = query.new_zeros((num_rows, num_heads, value_size))
    for head in range(num_heads):
        kv_head = head * num_kv_heads // num_heads
        scores = query[:, head].to(dtype) @ keys[:, kv_head].T * softmax_scale
        scores = scores.masked_fill(~is_kept, -torch.inf)
        probability = torch.softmax(scores, dim=1).masked_fill(~is_kept, 0.0)
        output[:, head] = (probability @ values[:, kv_head]).to(output.dtype)
    return output
