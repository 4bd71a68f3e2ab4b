"""Counts the bytes of tensors that torch makes while it is entered: now, and at their highest."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class TensorMemoryPeak(TorchDispatchMode):
    """`live_bytes` of storages made inside and not freed, `peak_bytes` the most there ever were.

    Of the threads that enter it: one may be entered by several. What a kernel allocates for itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, weakref.ref[Any]] = {}
        # A storage may be freed while one is counted.
        self._lock = threading.RLock()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(tensor.untyped_storage()) for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if id(storage) not in given:
                self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size_bytes = id(storage), storage.nbytes()

        def freed(_: Any) -> None:
            with self._lock:
                del self._known[key]
                self.live_bytes -= size_bytes

        with self._lock:
            if key in self._known:
                return
            self._known[key] = weakref.ref(storage, freed)
            self.live_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Those in arguments or results of an operator; torch's tree_leaves takes ten times as long."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
