"""BF16 pools, and the tags of their pages, in memory that another process can read but not change.

The memory has no name: it is handed on as a file descriptor, and is gone when both processes are, however they ended.
It is sealed, so that nobody can cut it short under the reader's feet or map it for writing.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from memopt.errors import HandOverError, UnsupportedError
from memopt.kernels.kv_formats import BF16
from memopt.kernels.layout import INDEXER_PAGE_BYTES
from memopt.runtime.kv.layer_kv import GqaLayerKv, KvPools, LayerKv, MlaLayerKv
from memopt.runtime.stages.kv_geometry import KvGeometry, LayerGeometry, geometry_of
from memopt.runtime.stages.page_conversion import device_of

MAX_REGION_BYTES = 2**46
# F_SEAL_FUTURE_WRITE, and F_SEAL_SHRINK with F_SEAL_GROW (linux/fcntl.h).
_SEAL_FUTURE_WRITE = 0x0010
_SIZE_SEALS = 0x0002 | 0x0004


@dataclass(frozen=True, slots=True)
class SharedRegion:
    """`pools` and `tags` int64 [num_pages] are views of the region; `file_descriptor` is the owner's to close, once."""

    pools: KvPools
    tags: Tensor
    file_descriptor: int
    size_bytes: int


def new_shared_region(like: KvPools) -> SharedRegion:
    """A region with zeroed pools as `like`, which are BF16 and on the CPU; `like` itself is not touched.

    Raises UnsupportedError for other pools or a system without sealed anonymous files.
    """
    if like.kv_format is not BF16 or device_of(like).type != "cpu":
        raise UnsupportedError(
            f"{like.kv_format.name} pools on {device_of(like)} cannot be shared", remedy="share bf16 pools on the CPU"
        )
    if not hasattr(os, "memfd_create"):
        raise UnsupportedError("this system has no memfd_create", remedy="use Linux, or a socket between the stages")
    geometry = geometry_of(like)
    size_bytes = region_bytes(geometry, like.num_pages)
    descriptor = os.memfd_create("memopt-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size_bytes)
        memory = mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS | _SEAL_FUTURE_WRITE)
    except BaseException:
        os.close(descriptor)
        raise
    pools, tags = _views(memory, geometry, like.num_pages, like.bad_slot)
    return SharedRegion(pools, tags, descriptor, size_bytes)


def open_shared_region(descriptor: int, geometry: KvGeometry, num_pages: int) -> SharedRegion:
    """The region behind a descriptor that another process sent, to be read only.

    HandOverError when it is not sealed, or not of the size that such pools take.
    """
    if num_pages < 1 or region_bytes(geometry, num_pages) > MAX_REGION_BYTES:
        raise HandOverError(f"a region of {num_pages} pages", remedy="both stages must run the same memopt")
    size_bytes = region_bytes(geometry, num_pages)
    try:
        seals, found_bytes = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS), os.fstat(descriptor).st_size
        if seals & _SIZE_SEALS != _SIZE_SEALS or found_bytes != size_bytes:
            raise HandOverError(
                f"the region has {found_bytes:,} bytes, not {size_bytes:,}, or its size is not sealed",
                remedy="both stages must run the same memopt",
            )
        memory = mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    except OSError as problem:
        raise HandOverError(f"the region cannot be mapped: {problem.strerror}") from problem
    pools, tags = _views(memory, geometry, num_pages, None)
    return SharedRegion(pools, tags, descriptor, size_bytes)


def region_bytes(geometry: KvGeometry, num_pages: int) -> int:
    """Bytes of a region: tags, then each layer's pools in order, every part from the start of a memory page."""
    return sum(_part_bytes(geometry, num_pages))


def _part_bytes(geometry: KvGeometry, num_pages: int) -> list[int]:
    parts = [num_pages * torch.int64.itemsize]
    for shape in geometry.layers:
        parts += [num_pages * math.prod(page) * BF16.value_bytes for page in shape.page_shapes]
        parts += [num_pages * INDEXER_PAGE_BYTES] if shape.has_indexer else []
    return [-(-part // mmap.PAGESIZE) * mmap.PAGESIZE for part in parts]


def _views(memory: mmap.mmap, geometry: KvGeometry, num_pages: int, bad_slot: Tensor | None) -> tuple[KvPools, Tensor]:
    with warnings.catch_warnings():
        # torch warns of memory that cannot be written to; here that is the point.
        warnings.simplefilter("ignore", UserWarning)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
    parts = iter(torch.split(whole, _part_bytes(geometry, num_pages)))
    tags = next(parts).view(torch.int64)[:num_pages]

    def pool(page_shape: tuple[int, ...]) -> Tensor:
        values = next(parts).view(torch.bfloat16)
        return values[: num_pages * math.prod(page_shape)].view(num_pages, *page_shape)

    def layer(shape: LayerGeometry) -> LayerKv:
        pools = [pool(page) for page in shape.page_shapes]
        if shape.num_kv_heads:
            return GqaLayerKv(pools[0], pools[1], None, None, BF16, bad_slot)
        indexer_pool = None
        if shape.has_indexer:
            indexer_pool = next(parts)[: num_pages * INDEXER_PAGE_BYTES].view(num_pages, INDEXER_PAGE_BYTES)
        return MlaLayerKv(pools[0], None, indexer_pool, BF16, bad_slot)

    layers = tuple(layer(shape) for shape in geometry.layers)
    return KvPools(BF16, num_pages, layers, bad_slot), tags
