"""How many pages the KV cache of an engine gets."""

from __future__ import annotations

import os

import torch

from memopt.errors import CapacityError, UsageError
from memopt.kernels.layout import PAGE_TOKENS
from memopt.runtime.engine.admission import EngineLimits

DEFAULT_CACHE_GIB = 1.0
# More than any machine has.
MAX_CACHE_GIB = 1 << 20
_GIB = 1 << 30
# One that is nobody's (kv/layer_kv.py, DUMMY_PAGE), and one to use.
MIN_PAGES = 2


def choose_num_pages(
    token_bytes: int, limits: EngineLimits, *, num_pages: int | None = None, kv_cache_gib: float | None = None
) -> int:
    """Pages of the pools, the dummy page among them. `token_bytes`: of a token in all layers of this rank.

    `num_pages` as it is; else as many as `kv_cache_gib` holds; else as many as DEFAULT_CACHE_GIB holds, but no more
    than `limits` can fill. Raises UsageError for both or for nonsense, CapacityError when not even two pages fit.
    """
    if num_pages is not None and kv_cache_gib is not None:
        raise UsageError("num_pages and kv_cache_gib both say how large the cache is", remedy="give one of them")
    if num_pages is not None:
        if num_pages < MIN_PAGES:
            raise UsageError(f"num_pages is {num_pages}, but one is kept back and at least one more is needed")
        return num_pages
    if kv_cache_gib is not None and not 0 < kv_cache_gib <= MAX_CACHE_GIB:
        raise UsageError(f"kv_cache_gib is {kv_cache_gib:g}", remedy=f"use more than 0 and at most {MAX_CACHE_GIB:,}")
    gib = DEFAULT_CACHE_GIB if kv_cache_gib is None else kv_cache_gib
    page_bytes = token_bytes * PAGE_TOKENS
    chosen = int(gib * _GIB) // page_bytes
    if chosen < MIN_PAGES:
        raise CapacityError(
            f"a KV cache of {gib:g} GiB holds {chosen} pages of {page_bytes:,} bytes, but at least {MIN_PAGES} are"
            " needed",
            remedy="raise kv_cache_gib",
        )
    return chosen if kv_cache_gib is not None else min(chosen, limits.max_requests * limits.max_pages + 1)


def require_memory(num_pages: int, token_bytes: int, memory_bytes: int) -> None:
    """CapacityError when the pages are larger than the memory of the machine, or of its device.

    An allocation that is too large need not fail: the kernel may end the process when pages are written, much later.
    """
    size_bytes = num_pages * token_bytes * PAGE_TOKENS
    if size_bytes > memory_bytes:
        raise CapacityError(
            f"{num_pages:,} pages of {token_bytes * PAGE_TOKENS:,} bytes are {size_bytes / _GIB:,.1f} GiB, and do not"
            f" fit into memory of {memory_bytes / _GIB:,.1f} GiB",
            remedy="lower num_pages or kv_cache_gib",
        )


def memory_bytes_of(device: torch.device | str) -> int:
    """All memory of a GPU, or of the machine."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
