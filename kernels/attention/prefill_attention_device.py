"""Attention of a prompt's chunk on a GPU: torch's scaled_dot_product_attention, which has kernels for these sizes.

Keys and values of the whole sequence are in memory at once: kv_heads * (D + V) * 2 bytes a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.attention.prefill_mask import causal_mask, selection_mask
from memopt.kernels.attention.prefill_tiles import ReadTile


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
    """Arguments as for `prefill_attention.prefill_attention`; any device that torch has the operator for."""
    num_rows, num_heads, _ = query.shape
    num_keys = first_position + num_rows
    keys, values = (part.to(query.dtype).transpose(0, 1)[None] for part in read_tile(0, num_keys))
    is_kept = causal_mask(torch.arange(first_position, num_keys, device=query.device), 0, num_keys)
    if selected is not None:
        is_kept &= selection_mask(selected, num_keys)
    output = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys, values, attn_mask=is_kept, scale=softmax_scale,
        enable_gqa=num_kv_heads != num_heads,
    )  # fmt: skip
    # A query that keeps nothing is NaN in some of torch's kernels.
    return torch.where(is_kept.any(dim=1)[:, None, None], output[0].transpose(0, 1), 0.0).contiguous()
