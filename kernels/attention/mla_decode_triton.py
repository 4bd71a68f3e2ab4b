"""Launches MLA decode on a GPU: one pass over the pages, and a merge when there are several splits."""

# mypy: allow-untyped-calls

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.attention.attention_output import AttentionOutput, new_output
from memopt.kernels.attention.decode_config import NARROW_HEADS, WIDE_HEADS, DecodeConfig, GpuFamily, gpu_family
from memopt.kernels.attention.mla_decode_kernel_triton import FORMAT_BF16, FORMAT_DS_MLA, FORMAT_E4M3, mla_decode_kernel
from memopt.kernels.attention.split_merge_triton import merge_splits
from memopt.kernels.device.current_device import on_tensors_device
from memopt.kernels.kv_cache.kv_format import ds_mla_views
from memopt.kernels.kv_formats import BF16, FP8_DS_MLA, FP8_E4M3, KvFormat
from memopt.kernels.layout import DS_MLA_SCALE_GROUP, MLA_LATENT_SIZE, MLA_ROPE_SIZE, PAGE_TOKENS

FORMATS = {BF16.name: FORMAT_BF16.value, FP8_E4M3.name: FORMAT_E4M3.value, FP8_DS_MLA.name: FORMAT_DS_MLA.value}


def choose_config(kv_format: KvFormat, num_heads: int, family: GpuFamily, *, is_selected: bool) -> DecodeConfig:
    """The one configuration of a shape; each compiles without spills (tests/kernels/compiled)."""
    if family == "amd":
        # 64 KB of shared memory hold half a page in float16, and the matrix unit has no tile of 8.
        return DecodeConfig(WIDE_HEADS, PAGE_TOKENS // 2, num_warps=4, num_stages=2)
    heads = NARROW_HEADS if num_heads <= NARROW_HEADS else WIDE_HEADS
    # On Hopper, single tokens' addresses and the next tile's bytes are more than the registers of 128 threads.
    is_wide = family == "hopper" and is_selected and kv_format is FP8_E4M3
    # With two stages ptxas spills a few bytes on Blackwell; for 16 heads three would not fit.
    is_deep = family == "blackwell" and heads == NARROW_HEADS and kv_format is BF16
    return DecodeConfig(heads, PAGE_TOKENS, num_warps=8 if is_wide else 4, num_stages=3 if is_deep else 2)


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
) -> AttentionOutput:
    """Arguments as for `mla_decode.mla_decode`."""
    return _launch(
        query_latent, query_rope, pool, block_table, num_tokens, None, kv_format, scale, softmax_scale, num_splits, out
    )


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
) -> AttentionOutput:
    """Arguments as for `mla_decode.sparse_mla_decode`."""
    return _launch(
        query_latent, query_rope, pool, block_table, None, positions, kv_format, scale, softmax_scale, num_splits, out
    )


def _views(pool: Tensor, kv_format: KvFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Latents, ropes and scales of a pool; formats without scales in the pool give the latents again."""
    if kv_format is FP8_DS_MLA:
        views = ds_mla_views(pool)
        return views.latent, views.rope, views.scales
    latents = pool[..., :MLA_LATENT_SIZE]
    return latents, pool[..., MLA_LATENT_SIZE:], latents


@on_tensors_device
def _launch(
    query_latent: Tensor,
    query_rope: Tensor,
    pool: Tensor,
    block_table: Tensor,
    num_tokens: Tensor | None,
    positions: Tensor | None,
    kv_format: KvFormat,
    scale: Tensor | None,
    softmax_scale: float,
    num_splits: int,
    out: AttentionOutput | None,
) -> AttentionOutput:
    num_requests, num_heads, _ = query_latent.shape
    result = new_output(query_latent, MLA_LATENT_SIZE) if out is None else out
    if num_requests == 0:
        return result
    config = choose_config(kv_format, num_heads, gpu_family(pool.device), is_selected=positions is not None)
    partial, log_sum_exps = result.output, result.log_sum_exp
    if num_splits > 1:
        shape = (num_requests, num_splits, num_heads)
        partial = torch.empty((*shape, MLA_LATENT_SIZE), dtype=torch.float32, device=pool.device)
        log_sum_exps = torch.empty(shape, dtype=torch.float32, device=pool.device)
    latents, ropes, scales = _views(pool, kv_format)
    mla_decode_kernel[(num_requests, -(-num_heads // config.heads), num_splits)](
        query_latent, query_rope, latents, ropes, scales, latents.stride(0), ropes.stride(0), scales.stride(0),
        pool.shape[0], block_table, positions.shape[1] if positions is not None else num_tokens,
        block_table if positions is None else positions, log_sum_exps if scale is None else scale, softmax_scale,
        partial, log_sum_exps, num_heads, block_table.shape[1], num_splits,
        FORMAT=FORMATS[kv_format.name], SELECTED=positions is not None, HEADS=config.heads, TILE=config.tile,
        PAGE=PAGE_TOKENS, GROUP=DS_MLA_SCALE_GROUP, ROPE=MLA_ROPE_SIZE,
        LATENTS_TOKEN=latents.stride(1), ROPES_TOKEN=ropes.stride(1), SCALES_TOKEN=scales.stride(1),
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=False,
    )  # fmt: skip
    return merge_splits(partial, log_sum_exps, result) if num_splits > 1 else result
