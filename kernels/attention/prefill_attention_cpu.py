"""Attention of a prompt's chunk on the CPU: float32 math, tiles of queries and of keys at fixed positions.

A query at position p stands in row p % QUERY_TILE of a tile, and meets keys in tiles that begin at multiples of
KEY_TILE, in order; products always have the same shapes. So its bits are the same however the prompt was cut. What a
query does not see is an exact identity: probability 0, and sums times 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from memopt.kernels.attention.prefill_mask import causal_mask, selection_mask
from memopt.kernels.attention.prefill_tiles import ReadTile

# A multiple of it is where a tile of keys ends, so that all rows of a tile meet the same tiles of keys.
QUERY_TILE = 64
KEY_TILE = 256


@dataclass(slots=True)
class QueryTile:
    """Queries float32 [kv_heads, G * QUERY_TILE, D] at `positions` int64 [QUERY_TILE], and their softmax so far."""

    query: Tensor
    positions: Tensor
    maximum: Tensor  # [kv_heads, G * QUERY_TILE]
    total: Tensor
    sums: Tensor  # [kv_heads, G * QUERY_TILE, V]

    def attend(self, keys: Tensor, values: Tensor, is_hidden: Tensor | None) -> None:
        """One tile of keys [kv_heads, KEY_TILE, D], values [.., V]; `is_hidden` bool [QUERY_TILE, KEY_TILE]."""
        scores = self.query @ keys.mT
        if is_hidden is not None:
            scores.view(scores.shape[0], -1, QUERY_TILE, KEY_TILE).masked_fill_(is_hidden, -torch.inf)
        maximum = torch.maximum(self.maximum, scores.amax(dim=-1))
        # Where nothing was seen so far, -inf - -inf would be NaN.
        base = maximum.clamp(min=torch.finfo(torch.float32).min)
        keep = torch.exp(self.maximum - base)
        probability = scores.sub_(base[..., None]).exp_()
        self.total = self.total.mul_(keep).add_(probability.sum(dim=-1))
        self.sums = self.sums.mul_(keep[..., None]).add_(probability @ values)
        self.maximum = maximum

    def result(self) -> Tensor:
        """Output [QUERY_TILE, kv_heads * G, V]; zeros where nothing was seen."""
        output = self.sums / self.total.masked_fill(self.total == 0, 1.0)[..., None]
        return output.view(-1, QUERY_TILE, output.shape[2]).transpose(0, 1)


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
    """Arguments as for `prefill_attention.prefill_attention`."""
    num_keys = first_position + query.shape[0]
    first_row = first_position // QUERY_TILE * QUERY_TILE
    tiles = _query_tiles(query, first_position, first_row, num_kv_heads, value_size, softmax_scale)
    chosen = None
    if selected is not None:
        # Rows of the tiles, of which the first ones may stand before the chunk.
        padding = (first_position - first_row, len(tiles) * QUERY_TILE - (num_keys - first_row))
        mask = selection_mask(selected, -(-num_keys // KEY_TILE) * KEY_TILE)
        chosen = torch.nn.functional.pad(mask, (0, 0, *padding)).view(len(tiles), QUERY_TILE, -1)
    for first_key in range(0, num_keys, KEY_TILE):
        after = first_key + KEY_TILE
        keys, values = (_padded_heads(part) for part in read_tile(first_key, min(after, num_keys)))
        for index, tile in enumerate(tiles):
            begin = first_row + index * QUERY_TILE
            if begin + QUERY_TILE <= first_key:
                continue
            is_hidden = None
            if after > begin:
                is_hidden = ~causal_mask(tile.positions, first_key, KEY_TILE)
            if chosen is not None:
                is_unchosen = ~chosen[index, :, first_key:after]
                is_hidden = is_unchosen if is_hidden is None else is_hidden | is_unchosen
            tile.attend(keys, values, is_hidden)
    output = torch.cat([tile.result() for tile in tiles])
    return output[first_position - first_row :][: query.shape[0]].to(query.dtype).contiguous()


def _query_tiles(
    query: Tensor, first_position: int, first_row: int, num_kv_heads: int, value_size: int, softmax_scale: float
) -> list[QueryTile]:
    """The tiles that hold a chunk's queries [R, Hq, D], the first at position `first_row`; other rows are zeros."""
    num_rows, num_heads, size = query.shape
    num_tiles = -(-(first_position + num_rows - first_row) // QUERY_TILE)
    begin = first_position - first_row
    rows = torch.zeros(num_tiles * QUERY_TILE, num_heads, size)
    rows[begin : begin + num_rows] = query.to(torch.float32) * softmax_scale
    tiles: list[QueryTile] = []
    for index, tile in enumerate(rows.view(num_tiles, QUERY_TILE, num_kv_heads, -1, size)):
        heads = tile.permute(1, 2, 0, 3).reshape(num_kv_heads, -1, size)
        first = first_row + index * QUERY_TILE
        tiles.append(
            QueryTile(
                heads,
                torch.arange(first, first + QUERY_TILE),
                torch.full(heads.shape[:2], -torch.inf),
                torch.zeros(heads.shape[:2]),
                torch.zeros(*heads.shape[:2], value_size),
            )
        )
    return tiles


def _padded_heads(part: Tensor) -> Tensor:
    """float32 [kv_heads, KEY_TILE, .] of a tile's keys or values [T, kv_heads, .], zeros past its T tokens."""
    padded = torch.zeros(part.shape[1], KEY_TILE, part.shape[2])
    padded[:, : part.shape[0]] = part.transpose(0, 1)
    return padded
