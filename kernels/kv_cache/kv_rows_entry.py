"""Compiles the loops of kv_rows_cpu.py on first use; cpu_entry.py says why each closes over a digest of its sources."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from memopt.kernels import cpu_number, layout
from memopt.kernels.compile_cache import compiled, source_digest
from memopt.kernels.kv_cache import kv_plain_rows_cpu, kv_rows_cpu
from memopt.kernels.kv_cache.kv_plain_rows_cpu import store_plain
from memopt.kernels.kv_cache.kv_rows_cpu import load_grouped, load_scaled, store_grouped, store_scaled
from memopt.kernels.rows import row_values_cpu

_SOURCES = (layout, cpu_number, kv_rows_cpu, row_values_cpu, kv_plain_rows_cpu)


@cache
def sources_key() -> str:
    """The digest that every entry closes over."""
    return source_digest(*(str(module.__file__) for module in _SOURCES), __file__)


@cache
def store_plain_entry() -> Callable[..., int]:
    """`store_plain`, compiled."""
    key = sources_key()

    @compiled
    def store(*arguments: Any) -> Any:
        key  # noqa: B018 - makes it a closure variable
        return store_plain(*arguments)

    return store


@cache
def store_scaled_entry() -> Callable[..., None]:
    """`store_scaled`, compiled."""
    key = sources_key()

    @compiled
    def store(*arguments: Any) -> Any:
        key  # noqa: B018 - makes it a closure variable
        return store_scaled(*arguments)

    return store


@cache
def store_grouped_entry() -> Callable[..., None]:
    """`store_grouped`, compiled."""
    key = sources_key()

    @compiled
    def store(*arguments: Any) -> Any:
        key  # noqa: B018 - makes it a closure variable
        return store_grouped(*arguments)

    return store


@cache
def load_scaled_entry() -> Callable[..., None]:
    """`load_scaled`, compiled."""
    key = sources_key()

    @compiled
    def load(*arguments: Any) -> Any:
        key  # noqa: B018 - makes it a closure variable
        return load_scaled(*arguments)

    return load


@cache
def load_grouped_entry() -> Callable[..., None]:
    """`load_grouped`, compiled."""
    key = sources_key()

    @compiled
    def load(*arguments: Any) -> Any:
        key  # noqa: B018 - makes it a closure variable
        return load_grouped(*arguments)

    return load
