"""Pages as the bytes of PAGES frames: which slices a sequence is sent in, and from pools to bytes and back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from memopt.errors import HandOverError
from memopt.kernels.kv_formats import BF16
from memopt.kernels.layout import INDEXER_PAGE_BYTES, PAGE_TOKENS
from memopt.runtime.kv.layer_kv import GqaLayerKv, LayerKv, MlaLayerKv
from memopt.runtime.stages.frames import PAGES_BODY_BYTES, PageSlice
from memopt.runtime.stages.kv_geometry import KvGeometry, LayerGeometry
from memopt.runtime.stages.page_conversion import indexer_pages, value_pages


def page_slices(number: int, geometry: KvGeometry, num_pages: int) -> Iterator[PageSlice]:
    """The slices of hand-over `number`, in the order in which they are sent: layer after layer, page after page."""
    for layer, shape in enumerate(geometry.layers):
        at_once = max(PAGES_BODY_BYTES // shape.page_bytes, 1)
        for first_page in range(0, num_pages, at_once):
            yield PageSlice(number, layer, min(at_once, num_pages - first_page), first_page)


def tokens_in(part: PageSlice, num_tokens: int) -> int:
    """How many of a sequence's `num_tokens` tokens lie in a slice."""
    return min(part.num_pages * PAGE_TOKENS, num_tokens - part.first_page * PAGE_TOKENS)


def slice_bytes(source: LayerKv, pages: Sequence[int], num_tokens: int) -> list[memoryview]:
    """Bytes of some pages of one layer's BF16 pools: latents, or K, then V; indexer pages last.

    Behind the last of `num_tokens` tokens are zeros, whatever lay in the pages before.
    """
    pools = (source.pool,) if isinstance(source, MlaLayerKv) else (source.key_pool, source.value_pool)
    numbers = torch.tensor(pages, dtype=torch.int64, device=pools[0].device)
    copies = [value_pages(pool, numbers, num_tokens) for pool in pools]
    if isinstance(source, MlaLayerKv) and source.indexer_pool is not None:
        copies.append(indexer_pages(source.indexer_pool, numbers, num_tokens))
    return [_as_bytes(copied.cpu()).numpy().data for copied in copies]


def layer_of_bytes(data: memoryview, shape: LayerGeometry, num_pages: int, device: torch.device) -> LayerKv:
    """BF16 pools of pages 0 to num_pages - 1, from what `slice_bytes` gave. HandOverError for another size."""
    if len(data) != num_pages * shape.page_bytes:
        raise HandOverError(
            f"{num_pages} pages of {shape} are {num_pages * shape.page_bytes:,} bytes, not {len(data):,}",
            remedy="both stages must run the same memopt",
        )
    pools: list[Tensor] = []
    start = 0
    for page_shape in shape.page_shapes:
        end = start + num_pages * math.prod(page_shape) * BF16.value_bytes
        pool = torch.empty((num_pages, *page_shape), dtype=torch.bfloat16)
        _as_bytes(pool).copy_(torch.frombuffer(data[start:end], dtype=torch.uint8))
        pools.append(pool.to(device))
        start = end
    if shape.num_kv_heads:
        return GqaLayerKv(pools[0], pools[1], None, None, BF16)
    indexer_pool = None
    if shape.has_indexer:
        # A copy: pools are aligned, the parts of a frame are not.
        indexer_pool = torch.frombuffer(data[start:], dtype=torch.uint8).clone().view(num_pages, INDEXER_PAGE_BYTES)
        indexer_pool = indexer_pool.to(device)
    return MlaLayerKv(pools[0], None, indexer_pool, BF16)


def _as_bytes(contiguous: Tensor) -> Tensor:
    return contiguous.view(-1).view(torch.uint8)
