"""The pools that hold KV pages, as tensors: shapes, dtypes, checks, and views of the fields inside a page.

A pool is one layer's pages. Its page stride may be larger than a page, so that layers can share one allocation; within
a page it is contiguous. A page id is an index into dimension 0, the same for every pool of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from memopt.errors import AlignmentError, ShapeError, UnsupportedError
from memopt.kernels.device.tensor_checks import require_tensor
from memopt.kernels.kv_formats import BF16, FP32, KvFormat
from memopt.kernels.layout import (
    DS_MLA_NUM_SCALES,
    DS_MLA_ROPE_OFFSET_BYTES,
    DS_MLA_SCALES_OFFSET_BYTES,
    INDEXER_KEY_SIZE,
    INDEXER_PAGE_BYTES,
    INDEXER_PAGE_ELEMENTS,
    INDEXER_PAGE_SCALES_OFFSET_BYTES,
    MLA_LATENT_SIZE,
    MLA_ROPE_SIZE,
    PAGE_TOKENS,
    POOL_ALIGNMENT_BYTES,
)


@dataclass(frozen=True, slots=True)
class DsMlaViews:
    """The fields of an fp8_ds_mla pool, without a copy: e4m3 codes, float32 scales, bfloat16 rope."""

    latent: Tensor  # uint8 [P, 64, 512]
    scales: Tensor  # float32 [P, 64, 4]
    rope: Tensor  # bfloat16 [P, 64, 64]


@dataclass(frozen=True, slots=True)
class IndexerViews:
    """The fields of an indexer pool, without a copy: e4m3 codes and float32 scales."""

    keys: Tensor  # uint8 [P, 64, 128]
    scales: Tensor  # float32 [P, 64]


def pool_dtype(kv_format: KvFormat) -> torch.dtype:
    """bfloat16, uint8 for the formats of e4m3 bytes, float32 for the reference format."""
    return {BF16.name: torch.bfloat16, FP32.name: torch.float32}.get(kv_format.name, torch.uint8)


def new_mla_pool(kv_format: KvFormat, num_pages: int, device: torch.device | str = "cpu") -> Tensor:
    """A zeroed MLA pool [P, 64, .]: 576 of bfloat16, uint8 (fp8_e4m3) or float32 (fp32), or 656 uint8 (fp8_ds_mla)."""
    return torch.zeros((num_pages, *kv_format.mla_page_shape), dtype=pool_dtype(kv_format), device=device)


def new_gqa_pool(
    kv_format: KvFormat, num_pages: int, num_kv_heads: int, head_dim: int, device: torch.device | str = "cpu"
) -> Tensor:
    """A zeroed pool for K, or for V: bfloat16, uint8 or float32 [P, 64, kv_heads, head_dim]."""
    shape = (num_pages, *kv_format.gqa_page_shape(num_kv_heads, head_dim))
    return torch.zeros(shape, dtype=pool_dtype(kv_format), device=device)


def new_indexer_pool(
    num_pages: int, device: torch.device | str = "cpu", *, kv_format: KvFormat | None = None
) -> Tensor:
    """A zeroed indexer pool: uint8 [P, 64 * 132], or float32 [P, 64 * 128] beside pools of the reference format."""
    if kv_format is not None and kv_format.is_reference:
        return torch.zeros((num_pages, INDEXER_PAGE_ELEMENTS), dtype=torch.float32, device=device)
    return torch.zeros((num_pages, INDEXER_PAGE_BYTES), dtype=torch.uint8, device=device)


def require_mla_pool(pool: Tensor, kv_format: KvFormat, *, like: Tensor | None = None) -> None:
    """ShapeError or AlignmentError unless `pool` is an MLA pool of that format, on the device of `like`."""
    _require_pool("the MLA pool", pool, kv_format.mla_page_shape, pool_dtype(kv_format), like)


def require_gqa_pool(
    name: str, pool: Tensor, kv_format: KvFormat, num_kv_heads: int, head_dim: int, *, like: Tensor | None = None
) -> None:
    """ShapeError or AlignmentError unless `pool` is a K or V pool of that format and shape, on the device of `like`."""
    _require_pool(name, pool, kv_format.gqa_page_shape(num_kv_heads, head_dim), pool_dtype(kv_format), like)


def require_indexer_pool(pool: Tensor, *, like: Tensor | None = None) -> None:
    """ShapeError or AlignmentError unless `pool` is an indexer pool, on the device of `like`."""
    if is_float_indexer_pool(pool):
        _require_pool("the indexer pool", pool, (INDEXER_PAGE_ELEMENTS,), torch.float32, like)
    else:
        _require_pool("the indexer pool", pool, (INDEXER_PAGE_BYTES,), torch.uint8, like)


def is_float_indexer_pool(pool: Tensor) -> bool:
    """Whether an indexer pool belongs to the reference format: float32 [P, 64 * 128], keys as they were computed."""
    return pool.dtype == torch.float32


def float_indexer_keys(pool: Tensor) -> Tensor:
    """The keys float32 [P, 64, 128] of such a pool; writing to the view writes to the pool."""
    return pool.view(-1, PAGE_TOKENS, INDEXER_KEY_SIZE)


def require_mla_scale(scale: Tensor | None, kv_format: KvFormat, *, like: Tensor) -> None:
    """ShapeError unless `scale` is a float32 scalar where the format has a layer scale, and None where it has none."""
    _require_scale("scale", scale, (), kv_format, like)


def require_gqa_scale(name: str, scale: Tensor | None, kv_format: KvFormat, num_kv_heads: int, *, like: Tensor) -> None:
    """ShapeError unless `scale` is float32 [kv_heads] where the format has layer scales, and None where it has none."""
    _require_scale(name, scale, (num_kv_heads,), kv_format, like)


def ds_mla_views(pool: Tensor) -> DsMlaViews:
    """The fields of an fp8_ds_mla pool uint8 [P, 64, 656]; writing to a view writes to the pool."""
    first_scale = DS_MLA_SCALES_OFFSET_BYTES // torch.float32.itemsize
    first_rope = DS_MLA_ROPE_OFFSET_BYTES // torch.bfloat16.itemsize
    return DsMlaViews(
        latent=pool[..., :MLA_LATENT_SIZE],
        scales=pool.view(torch.float32)[..., first_scale : first_scale + DS_MLA_NUM_SCALES],
        rope=pool.view(torch.bfloat16)[..., first_rope : first_rope + MLA_ROPE_SIZE],
    )


def indexer_views(pool: Tensor) -> IndexerViews:
    """The fields of an indexer pool uint8 [P, 64 * 132]; writing to a view writes to the pool."""
    first_scale = INDEXER_PAGE_SCALES_OFFSET_BYTES // torch.float32.itemsize
    return IndexerViews(
        keys=pool[:, :INDEXER_PAGE_SCALES_OFFSET_BYTES].view(-1, PAGE_TOKENS, INDEXER_KEY_SIZE),
        scales=pool.view(torch.float32)[:, first_scale:],
    )


def _require_pool(
    name: str, pool: Tensor, page_shape: tuple[int, ...], dtype: torch.dtype, like: Tensor | None
) -> None:
    require_tensor(name, pool, (None, *page_shape), dtype, like=like, contiguous=False)
    if dtype == torch.float32 and pool.is_cuda:
        raise UnsupportedError(
            f"{name} {list(pool.shape)} is float32 on {pool.device}, but the reference format has no GPU kernels",
            remedy="use bf16, or the CPU",
        )
    if pool.shape[0] == 0:
        raise ShapeError(f"{name} {list(pool.shape)} has no pages")
    if not pool[0].is_contiguous() or pool.stride(0) < pool[0].numel():
        raise ShapeError(
            f"{name} {list(pool.shape)} has strides {list(pool.stride())}, but each page must be contiguous",
            remedy="only the first dimension may have a stride of its own",
        )
    for what, place in (
        ("page stride", pool.stride(0) * pool.element_size()),
        ("address", pool.data_ptr()),
    ):
        if place % POOL_ALIGNMENT_BYTES:
            raise AlignmentError(
                f"the {what} of {name} is {place}, not a multiple of {POOL_ALIGNMENT_BYTES}",
                remedy="allocate whole pages one after another",
            )


def _require_scale(name: str, scale: Tensor | None, shape: tuple[int, ...], kv_format: KvFormat, like: Tensor) -> None:
    if scale is None:
        if kv_format.has_layer_scale:
            raise ShapeError(f"KV format {kv_format.name} needs {name}, a float32 tensor {list(shape)}, but got none")
    elif not kv_format.has_layer_scale:
        raise ShapeError(f"KV format {kv_format.name} has no layer scale, but got {name} {list(scale.shape)}")
    else:
        require_tensor(name, scale, shape, torch.float32, like=like)
