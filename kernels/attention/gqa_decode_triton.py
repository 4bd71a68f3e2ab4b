"""Launches GQA decode on a GPU: one pass over the pages, and a merge when there are several splits."""

# mypy: allow-untyped-calls

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.attention.attention_output import AttentionOutput, new_output
from memopt.kernels.attention.decode_config import NARROW_HEADS, WIDE_HEADS, DecodeConfig, GpuFamily, gpu_family
from memopt.kernels.attention.gqa_decode_kernel_triton import gqa_decode_kernel
from memopt.kernels.attention.split_merge_triton import merge_splits
from memopt.kernels.device.current_device import on_tensors_device
from memopt.kernels.kv_formats import FP8_E4M3, KvFormat
from memopt.kernels.layout import PAGE_TOKENS


def choose_config(kv_format: KvFormat, group_heads: int, family: GpuFamily) -> DecodeConfig:
    """The one configuration of a shape; each compiles without spills (tests/kernels/compiled)."""
    if family == "amd":
        # 64 KB of shared memory hold one page of K and V with the next, and the matrix unit has no tile of 8.
        return DecodeConfig(WIDE_HEADS, PAGE_TOKENS, num_warps=4, num_stages=2)
    heads = NARROW_HEADS if group_heads <= NARROW_HEADS else WIDE_HEADS
    # On Blackwell, 16 heads and the next tile's bytes are a few more than the registers of 128 threads.
    is_wide = family == "blackwell" and heads == WIDE_HEADS and kv_format is FP8_E4M3
    return DecodeConfig(heads, 2 * PAGE_TOKENS, num_warps=8 if is_wide else 4, num_stages=2)


@on_tensors_device
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
    """Arguments as for `gqa_decode.gqa_decode`."""
    num_requests, num_heads, head_dim = query.shape
    result = new_output(query, head_dim) if out is None else out
    if num_requests == 0:
        return result
    num_kv_heads = key_pool.shape[2]
    group_heads = num_heads // num_kv_heads
    config = choose_config(kv_format, group_heads, gpu_family(query.device))
    partial, log_sum_exps = result.output, result.log_sum_exp
    if num_splits > 1:
        shape = (num_requests, num_splits, num_heads)
        partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=query.device)
        log_sum_exps = torch.empty(shape, dtype=torch.float32, device=query.device)
    gqa_decode_kernel[(num_requests, num_kv_heads * -(-group_heads // config.heads), num_splits)](
        query, key_pool, value_pool, key_pool.stride(0), value_pool.stride(0), key_pool.shape[0], block_table,
        num_tokens, log_sum_exps if k_scale is None else k_scale, log_sum_exps if v_scale is None else v_scale,
        softmax_scale, partial, log_sum_exps, num_heads, block_table.shape[1], num_splits,
        IS_FP8=kv_format.has_layer_scale, KV_HEADS=num_kv_heads, GROUP_HEADS=group_heads, HEADS=config.heads,
        DIM=head_dim, TILE=config.tile, PAGE=PAGE_TOKENS,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=False,
    )  # fmt: skip
    return merge_splits(partial, log_sum_exps, result) if num_splits > 1 else result
