"""DSA indexer scores over the indexer's paged keys: checks, then the kernel of the device that holds the pool."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.errors import UnsupportedError
from memopt.kernels.attention import indexer_scores_cpu
from memopt.kernels.attention.decode_checks import require_block_table, require_pages
from memopt.kernels.device.tensor_checks import require_tensor
from memopt.kernels.kv_cache.kv_format import require_indexer_pool
from memopt.kernels.layout import INDEXER_KEY_SIZE, PAGE_TOKENS

# GLM-5.x and DeepSeek-V3.2 have 32 and 64.
MAX_HEADS = 64


def indexer_scores(
    query: Tensor,
    head_weights: Tensor,
    pool: Tensor,
    block_table: Tensor,
    num_tokens: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """float32 [B, max_pages * 64]: sum over heads of weight * relu(query . key), and -inf past a request's tokens.

    `query` [B, heads, 128]: float8_e4m3fn, bfloat16 or float32, up to 64 heads, with rotary embedding and any Hadamard
    transform applied. `head_weights` float32 [B, heads]: whatever else multiplies a head, namely softmax scale
    (128 ** -0.5), heads ** -0.5 and the scale of an FP8 query (positive: it passes through relu). `pool` uint8
    [P, 64 * 132]; a key's scale is multiplied in here. `block_table` int32 [B, max_pages], `num_tokens` int32 [B].
    `out`: where to write, else it is allocated. Raises ShapeError, AlignmentError or UsageError for what does not fit,
    UnsupportedError for more heads; on the CPU also UsageError for a page that is not in the pool, which on a GPU
    scores -inf. Source: transformers 5.24, models/glm_moe_dsa (GlmMoeDsaIndexer.forward).
    """
    require_indexer_pool(pool)
    require_tensor(
        "query", query, (None, None, INDEXER_KEY_SIZE), torch.float8_e4m3fn, torch.bfloat16, torch.float32, like=pool
    )
    require_tensor("head_weights", head_weights, tuple(query.shape[:2]), torch.float32, like=pool)
    if query.shape[1] > MAX_HEADS:
        raise UnsupportedError(f"the indexer query has {query.shape[1]} heads, but at most {MAX_HEADS} have a kernel")
    require_block_table(block_table, num_tokens, query)
    if out is not None:
        shape = (query.shape[0], block_table.shape[1] * PAGE_TOKENS)
        require_tensor("out", out, shape, torch.float32, like=pool)
    if pool.is_cuda:
        from memopt.kernels.attention import indexer_scores_triton

        return indexer_scores_triton.indexer_scores(query, head_weights, pool, block_table, num_tokens, out)
    require_pages(block_table, num_tokens, pool.shape[0])
    return indexer_scores_cpu.indexer_scores(query, head_weights, pool, block_table, num_tokens, out)
