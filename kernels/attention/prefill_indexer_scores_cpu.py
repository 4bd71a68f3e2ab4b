"""DSA indexer scores of a prompt's chunk on the CPU: float32 math, tiles of queries and of keys at fixed positions.

As in prefill_attention_cpu.py, products always have the same shapes and a query always stands at the same place in its
tile, so that its bits are the same however the prompt was cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.kv_cache.kv_load import read_indexer_keys
from memopt.kernels.kv_cache.kv_slots import slots_of_pages

QUERY_TILE = 16
# A tile's products of 32 heads are 1 MB of float32.
KEY_TILE = 512


def prefill_indexer_scores(
    query: Tensor, head_weights: Tensor, pool: Tensor, pages: Tensor, first_position: int
) -> Tensor:
    """Arguments as for `prefill_indexer_scores.prefill_indexer_scores`."""
    num_rows, num_heads, key_size = query.shape
    num_keys = first_position + num_rows
    first_row = first_position // QUERY_TILE * QUERY_TILE
    num_tiles = -(-(num_keys - first_row) // QUERY_TILE)
    begin = first_position - first_row
    queries = torch.zeros(num_tiles * QUERY_TILE, num_heads, key_size)
    queries[begin : begin + num_rows] = query
    weights = torch.zeros(num_tiles * QUERY_TILE, 1, num_heads)
    weights[begin : begin + num_rows, 0] = head_weights
    scores = torch.full((num_tiles * QUERY_TILE, -(-num_keys // KEY_TILE) * KEY_TILE), -torch.inf)
    slots = slots_of_pages(pages, num_keys)
    for first_key in range(0, num_keys, KEY_TILE):
        keys = torch.zeros(KEY_TILE, key_size)
        found = read_indexer_keys(pool, slots[first_key : first_key + KEY_TILE])
        keys[: found.shape[0]] = found
        for row in range(0, num_tiles * QUERY_TILE, QUERY_TILE):
            if first_row + row + QUERY_TILE <= first_key:
                continue
            tile = slice(row, row + QUERY_TILE)
            products = (queries[tile].view(-1, key_size) @ keys.T).relu_().view(QUERY_TILE, num_heads, KEY_TILE)
            scores[tile, first_key : first_key + KEY_TILE] = (weights[tile] @ products)[:, 0]
    scores = scores[begin : begin + num_rows]
    positions = torch.arange(first_position, num_keys)
    return scores.masked_fill_(torch.arange(scores.shape[1]) > positions[:, None], -torch.inf)
