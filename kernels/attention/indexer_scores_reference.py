"""DSA indexer scores: plain torch, written to be read. It defines the result."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.attention.softmax_reference import compute_dtype
from memopt.kernels.kv_cache.kv_load import read_indexer_keys
from memopt.kernels.kv_cache.kv_slots import slots_of_pages
from memopt.kernels.layout import PAGE_TOKENS


def indexer_scores(
    query: Tensor,
    head_weights: Tensor,
    pool: Tensor,
    block_table: Tensor,
    num_tokens: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Arguments as for `indexer_scores.indexer_scores`; a float64 query is computed and returned in float64."""
    dtype = compute_dtype(query)
    shape = (query.shape[0], block_table.shape[1] * PAGE_TOKENS)
    scores = torch.empty(shape, dtype=dtype, device=query.device) if out is None else out
    scores.fill_(-torch.inf)
    for request, (pages, count) in enumerate(zip(block_table, num_tokens.tolist(), strict=True)):
        keys = read_indexer_keys(pool, slots_of_pages(pages, count)).to(dtype)
        products = torch.relu(query[request].to(dtype) @ keys.T)
        scores[request, :count] = head_weights[request].to(dtype) @ products
    return scores
