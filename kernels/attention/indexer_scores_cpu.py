"""DSA indexer scores on the CPU: float32 math on dequantized tiles, a request at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.kv_cache.kv_load import e4m3_values, read_indexer_keys
from memopt.kernels.kv_cache.kv_slots import slots_of_pages
from memopt.kernels.layout import PAGE_TOKENS

# Tokens a tile: 4 MB of float32 keys.
TILE_TOKENS = 8192


def indexer_scores(
    query: Tensor,
    head_weights: Tensor,
    pool: Tensor,
    block_table: Tensor,
    num_tokens: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Arguments as for `indexer_scores.indexer_scores`."""
    shape = (query.shape[0], block_table.shape[1] * PAGE_TOKENS)
    scores = torch.empty(shape, dtype=torch.float32) if out is None else out
    for request, (pages, count) in enumerate(zip(block_table, num_tokens.tolist(), strict=True)):
        queries = _float32(query[request])
        scores[request, count:] = -torch.inf
        for begin in range(0, count, TILE_TOKENS):
            tile = slice(begin, min(begin + TILE_TOKENS, count))
            keys = read_indexer_keys(pool, slots_of_pages(pages, tile.stop)[begin:])
            scores[request, tile] = head_weights[request] @ (queries @ keys.T).relu_()
    return scores


def _float32(query: Tensor) -> Tensor:
    if query.dtype == torch.float8_e4m3fn:
        return e4m3_values(query.view(torch.uint8))
    return query.to(torch.float32).clone()
