"""Attention of one request on the CPU, tile by tile: float32 matmul, softmax, matmul.

Each request is computed alone, in tiles that its own length decides: its result is the same bit for bit whatever else
is in the batch. torch's scaled_dot_product_attention on BF16 rows is 20 to 100 times slower: docs/kernels/attention.md.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

# Tokens a tile: 9 MB of float32 for MLA, so that a tile is still in the last-level cache for the second product.
TILE_TOKENS = 2048


def attend_tiles(
    query: Tensor, tiles: Iterable[tuple[Tensor, Tensor]], value_size: int, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """As `softmax_reference.attend`, over tiles of (keys [., T, D], values [., T, V]); all are float32.

    `query` [., H, D], where the first dimension, if there is one, is that of heads with keys of their own.
    """
    maximum = query.new_full(query.shape[:-1], -torch.inf)
    total = torch.zeros_like(maximum)
    sums = query.new_zeros((*query.shape[:-1], value_size))
    for keys, values in tiles:
        scores = (query @ keys.mT).mul_(softmax_scale)
        new_maximum = torch.maximum(maximum, scores.amax(dim=-1))
        keep = torch.exp(maximum - new_maximum)
        probability = scores.sub_(new_maximum[..., None]).exp_()
        total = total * keep + probability.sum(dim=-1)
        sums = sums.mul_(keep[..., None]).add_(probability @ values)
        maximum = new_maximum
    empty = total == 0
    output = torch.where(empty[..., None], 0.0, sums / total[..., None])
    return output, torch.where(empty, -torch.inf, maximum + total.log())
