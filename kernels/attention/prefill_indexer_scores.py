"""DSA indexer scores of a prompt's chunk: checks, then the path of the device that holds the keys."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.errors import ShapeError
from memopt.kernels.attention import prefill_indexer_scores_cpu
from memopt.kernels.attention.indexer_scores import indexer_scores
from memopt.kernels.device.tensor_checks import require_tensor
from memopt.kernels.kv_cache.kv_format import require_indexer_pool
from memopt.kernels.layout import INDEXER_KEY_SIZE, PAGE_TOKENS


def prefill_indexer_scores(
    query: Tensor, head_weights: Tensor, pool: Tensor, pages: Tensor, first_position: int
) -> Tensor:
    """float32 [R, N], N at least first_position + R: scores of a chunk's queries, -inf past a query's own position.

    `query` [R, heads, 128] (bfloat16 or float32) and `head_weights` float32 [R, heads] as for
    `indexer_scores.indexer_scores`, at positions first_position to first_position + R - 1 of one sequence, whose pages
    int32 [max_pages] hold all keys up to there. On the CPU a query's bits depend on its own sequence and position
    alone; a GPU runs the kernel of decode. Raises ShapeError, AlignmentError or UsageError for what does not fit.
    """
    require_indexer_pool(pool)
    require_tensor("query", query, (None, None, INDEXER_KEY_SIZE), torch.bfloat16, torch.float32, like=pool)
    require_tensor("head_weights", head_weights, tuple(query.shape[:2]), torch.float32, like=pool)
    require_tensor("pages", pages, (None,), torch.int32, like=pool)
    num_rows = query.shape[0]
    if not 0 <= first_position <= pages.shape[0] * PAGE_TOKENS - num_rows:
        raise ShapeError(
            f"{num_rows} queries from position {first_position} do not fit {pages.shape[0]} pages of {PAGE_TOKENS} "
            "tokens"
        )
    if not pool.is_cuda:
        return prefill_indexer_scores_cpu.prefill_indexer_scores(query, head_weights, pool, pages, first_position)
    num_tokens = torch.arange(first_position + 1, first_position + num_rows + 1, dtype=torch.int32, device=pool.device)
    table = pages[None].expand(num_rows, -1).contiguous()
    return indexer_scores(query, head_weights, pool, table, num_tokens)
