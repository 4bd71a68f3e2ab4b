"""GQA decode attention over paged K and V: checks, then the kernel of the device that holds the pools."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.errors import ShapeError, UnsupportedError
from memopt.kernels.attention import gqa_decode_cpu
from memopt.kernels.attention.attention_output import AttentionOutput
from memopt.kernels.attention.decode_checks import (
    require_block_table,
    require_output,
    require_pages,
    require_splits,
)
from memopt.kernels.device.tensor_checks import require_tensor
from memopt.kernels.kv_cache.kv_format import require_gqa_pool, require_gqa_scale
from memopt.kernels.kv_formats import KvFormat
from memopt.kernels.layout import PAGE_TOKENS

# What the tiles of the GPU kernel are cut for: GLM-4.x has 128.
HEAD_DIMS = (64, 128)


def gqa_decode(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    block_table: Tensor,
    num_tokens: Tensor,
    *,
    kv_format: KvFormat,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    softmax_scale: float,
    num_splits: int = 1,
    out: AttentionOutput | None = None,
) -> AttentionOutput:
    """One query token a request over all of the request's tokens: output [B, Hq, D] and log-sum-exp [B, Hq].

    `query` [B, Hq, D], bfloat16 or float32, contiguous; D is 64 or 128. Query head h reads KV head h * kv_heads // Hq.
    `key_pool`, `value_pool` [P, 64, kv_heads, D]: kv_cache/kv_format.py. `k_scale`, `v_scale`: float32 [kv_heads] for
    fp8_e4m3, else None. Other arguments and errors as for `mla_decode.mla_decode`; UnsupportedError for another D.
    """
    require_tensor("query", query, (None, None, None), torch.bfloat16, torch.float32)
    require_tensor("key_pool", key_pool, (None, PAGE_TOKENS, None, None), like=query, contiguous=False)
    num_kv_heads, head_dim = key_pool.shape[2:]
    if query.shape[2] != head_dim or num_kv_heads == 0 or query.shape[1] % num_kv_heads:
        raise ShapeError(
            f"query {list(query.shape)} does not fit key_pool {list(key_pool.shape)}: head sizes must be equal and the "
            "query heads a multiple of the KV heads"
        )
    if head_dim not in HEAD_DIMS:
        raise UnsupportedError(
            f"heads of {head_dim} elements have no kernel", remedy=f"use {' or '.join(map(str, HEAD_DIMS))}"
        )
    for name, pool, scale in (("key", key_pool, k_scale), ("value", value_pool, v_scale)):
        require_gqa_pool(f"{name}_pool", pool, kv_format, num_kv_heads, head_dim, like=query)
        require_gqa_scale(f"{name[0]}_scale", scale, kv_format, num_kv_heads, like=query)
    if key_pool.shape[0] != value_pool.shape[0]:
        raise ShapeError(f"key_pool has {key_pool.shape[0]} pages, but value_pool has {value_pool.shape[0]}")
    require_block_table(block_table, num_tokens, query)
    require_splits(num_splits)
    require_output(out, query, head_dim)
    if query.is_cuda:
        from memopt.kernels.attention import gqa_decode_triton

        run = gqa_decode_triton.gqa_decode
    else:
        require_pages(block_table, num_tokens, key_pool.shape[0])
        run = gqa_decode_cpu.gqa_decode
    return run(
        query, key_pool, value_pool, block_table, num_tokens, kv_format=kv_format, k_scale=k_scale, v_scale=v_scale,
        softmax_scale=softmax_scale, num_splits=num_splits, out=out,
    )  # fmt: skip
