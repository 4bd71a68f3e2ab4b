"""Compiles the numba kernels' entry points on first use, with a disk cache that knows every file they depend on.

numba's own cache looks only at the file of the function it caches. After an upgrade that changed a helper's file it
would run the old machine code and write other bytes than the reference. So each entry closes over a digest of all the
kernel sources: numba makes closed-over values part of the cache key. The helpers themselves are not cached.
Where there is no folder to cache in, compile_cache.py compiles anew in every process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from memopt.kernels.compile_cache import compiled, source_digest
from memopt.kernels.cpu_expand import expand_fp8, expand_int4, scaled_bits
from memopt.kernels.cpu_quantize import quantize_tiles
from memopt.kernels.cpu_scale_search import search_tiles

_SOURCES = (
    "layout", "int4_spec", "cpu_number", "cpu_tile", "cpu_search_error", "cpu_search", "cpu_quantize",
    "cpu_scale_search", "cpu_expand", "cpu_entry",
)  # fmt: skip


@cache
def sources_key() -> str:
    """The digest that every entry closes over."""
    return source_digest(*(Path(__file__).with_name(f"{name}.py") for name in _SOURCES))


@cache
def quantize_entry() -> Callable[..., bool]:
    """`quantize_tiles`, compiled."""
    key = sources_key()

    @compiled
    def quantize(*arguments: Any) -> Any:
        key  # noqa: B018 - makes it a closure variable
        return quantize_tiles(*arguments)

    return quantize


@cache
def search_entry() -> Callable[..., bool]:
    """`search_tiles`, compiled."""
    key = sources_key()

    @compiled
    def search(*arguments: Any) -> Any:
        key  # noqa: B018 - makes it a closure variable
        return search_tiles(*arguments)

    return search


@cache
def expand_fp8_entry() -> Callable[..., bool]:
    """`expand_fp8`, compiled."""
    key = sources_key()

    @compiled
    def expand(*arguments: Any) -> Any:
        key  # noqa: B018 - makes it a closure variable
        return expand_fp8(*arguments)

    return expand


@cache
def expand_int4_entry() -> Callable[..., None]:
    """`expand_int4`, compiled."""
    key = sources_key()

    @compiled
    def expand(*arguments: Any) -> Any:
        key  # noqa: B018 - makes it a closure variable
        return expand_int4(*arguments)

    return expand


@cache
def scaled_bits_entry() -> Callable[..., Any]:
    """`scaled_bits`, compiled."""
    key = sources_key()

    @compiled
    def scaled(*arguments: Any) -> Any:
        key  # noqa: B018 - makes it a closure variable
        return scaled_bits(*arguments)

    return scaled
