"""MLA decode attention over paged KV: checks, then the kernel of the device that holds the pool.

Queries are absorbed: query_latent = query_nope @ W_UK of the head, so that the cached latent is both key and value;
the caller multiplies the result by W_UV. docs/kernels/attention.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.attention import mla_decode_cpu
from memopt.kernels.attention.attention_output import AttentionOutput
from memopt.kernels.attention.decode_checks import (
    require_block_table,
    require_output,
    require_pages,
    require_positions,
    require_splits,
)
from memopt.kernels.device.tensor_checks import require_tensor
from memopt.kernels.kv_cache.kv_format import require_mla_pool, require_mla_scale
from memopt.kernels.kv_formats import KvFormat
from memopt.kernels.layout import MLA_LATENT_SIZE, MLA_ROPE_SIZE


def mla_decode(
    query_latent: Tensor,
    query_rope: Tensor,
    pool: Tensor,
    block_table: Tensor,
    num_tokens: Tensor,
    *,
    kv_format: KvFormat,
    scale: Tensor | None = None,
    softmax_scale: float,
    num_splits: int = 1,
    out: AttentionOutput | None = None,
    is_checked: bool = False,
) -> AttentionOutput:
    """One query token a request over all of the request's tokens: output [B, H, 512] and log-sum-exp [B, H].

    `query_latent` [B, H, 512] and `query_rope` [B, H, 64]: bfloat16 or float32, contiguous, any number of heads.
    `pool`: kv_cache/kv_format.py. `block_table` int32 [B, max_pages], `num_tokens` int32 [B]; what the table holds past
    a request's tokens is not read. `scale`: float32 scalar of the layer for fp8_e4m3, else None. `num_splits`: runs of
    pages that a request is cut into on a GPU, at places that its own length decides; 1 for the same bytes whatever the
    batch, the length of the other requests or the number of processors. `out`: where to write, else it is allocated.
    `is_checked`: the caller vouches for types and shapes. On the CPU it may then give queries of less than 512 and 64
    elements, where the pool holds zeros behind; so has the output. What would lie outside the pool is refused even so.
    Raises ShapeError, AlignmentError or UsageError for what does not fit; on the CPU also UsageError for a page that is
    not in the pool, which on a GPU counts as no tokens (page_tags finds it).
    """
    if not is_checked:
        _check_queries(query_latent, query_rope, pool, kv_format, scale)
        require_block_table(block_table, num_tokens, query_latent)
        require_splits(num_splits)
        require_output(out, query_latent, MLA_LATENT_SIZE)
        if not pool.is_cuda:
            require_pages(block_table, num_tokens, pool.shape[0])
    if pool.is_cuda:
        from memopt.kernels.attention import mla_decode_triton

        run = mla_decode_triton.mla_decode
    else:
        run = mla_decode_cpu.mla_decode
    return run(
        query_latent, query_rope, pool, block_table, num_tokens,
        kv_format=kv_format, scale=scale, softmax_scale=softmax_scale, num_splits=num_splits, out=out,
    )  # fmt: skip


def sparse_mla_decode(
    query_latent: Tensor,
    query_rope: Tensor,
    pool: Tensor,
    block_table: Tensor,
    positions: Tensor,
    *,
    kv_format: KvFormat,
    scale: Tensor | None = None,
    softmax_scale: float,
    num_splits: int = 1,
    out: AttentionOutput | None = None,
    is_checked: bool = False,
) -> AttentionOutput:
    """As `mla_decode`, over selected tokens only: `positions` int32 [B, k] of tokens in their sequence, -1 for none.

    `positions` as `top_k` returns them; one that stands there twice counts twice. Other arguments and errors as for
    `mla_decode`; on the CPU also UsageError for a position past the block table, which on a GPU
    counts as none.
    """
    if not is_checked:
        _check_queries(query_latent, query_rope, pool, kv_format, scale)
        require_positions(positions, block_table, query_latent, pool.shape[0])
        require_splits(num_splits)
        require_output(out, query_latent, MLA_LATENT_SIZE)
    if pool.is_cuda:
        from memopt.kernels.attention import mla_decode_triton

        run = mla_decode_triton.sparse_mla_decode
    else:
        run = mla_decode_cpu.sparse_mla_decode
    return run(
        query_latent, query_rope, pool, block_table, positions,
        kv_format=kv_format, scale=scale, softmax_scale=softmax_scale, num_splits=num_splits, out=out,
    )  # fmt: skip


def _check_queries(
    query_latent: Tensor, query_rope: Tensor, pool: Tensor, kv_format: KvFormat, scale: Tensor | None
) -> None:
    require_mla_pool(pool, kv_format)
    require_mla_scale(scale, kv_format, like=pool)
    require_tensor(
        "query_latent", query_latent, (None, None, MLA_LATENT_SIZE), torch.bfloat16, torch.float32, like=pool
    )
    shape = (*query_latent.shape[:2], MLA_ROPE_SIZE)
    require_tensor("query_rope", query_rope, shape, query_latent.dtype, like=pool)
