"""Memory that verified tensors live in: private, in huge pages where there are any, freed with the last tensor."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from memopt.errors import MemoptIOError, UnsupportedError
from memopt.manifests.dtypes import ITEM_SIZE_BYTES
from memopt.manifests.safetensors_header import TensorHeader

if TYPE_CHECKING:
    import torch

_HUGE_PAGE_SIZE_BYTES = 2 * 2**20
# Below this a mapping of its own is a waste, and a process may have only some 65,000.
_SMALL_SIZE_BYTES = 2**17
# An arena starts where a page starts; data that lies at this multiple in a file does so in memory.
ALIGNMENT_BYTES = 64
# safetensors' names of torch's types.
_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}


def new_memory(size_bytes: int) -> memoryview:
    """Zeroed private bytes, no file behind them; MemoptIOError if there is no such memory.

    In 4 KiB pages the page faults cost as much as the hash does; so huge pages are asked for.
    """
    if size_bytes < _SMALL_SIZE_BYTES:
        return memoryview(bytearray(size_bytes))
    try:
        arena = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as problem:
        raise MemoptIOError(
            f"cannot allocate {size_bytes:,} bytes: {problem}", remedy="free some memory, or load fewer tensors"
        ) from None
    if size_bytes >= _HUGE_PAGE_SIZE_BYTES:
        # Kernels without transparent huge pages refuse the advice; it is only about speed.
        with suppress(OSError, AttributeError):
            arena.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(arena)


def tensor_at(memory: memoryview, position: int, tensor: TensorHeader) -> torch.Tensor:
    """The tensor whose bytes start at `position` of verified `memory`, as a view that keeps the memory alive.

    Data that is not aligned for its type (foreign files) is copied.
    """
    import torch

    dtype: torch.dtype | None = getattr(torch, _TORCH_NAMES[tensor.dtype], None)
    if dtype is None:
        raise UnsupportedError(
            f"torch {torch.__version__} has no {_TORCH_NAMES[tensor.dtype]}", tensor=tensor.name, remedy="update torch"
        )
    if tensor.size_bytes == 0:
        return torch.empty(tensor.shape, dtype=dtype)
    part = memory[position : position + tensor.size_bytes]
    if position % ITEM_SIZE_BYTES[tensor.dtype]:
        part = memoryview(bytearray(part))
    return torch.frombuffer(part, dtype=dtype).reshape(tensor.shape)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable; valid as long as the tensor is."""
    size_bytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size_bytes).from_address(tensor.data_ptr())).cast("B")


def is_same_kind(tensor: torch.Tensor, header: TensorHeader) -> bool:
    """Whether `tensor` has the type and shape of a stored tensor."""
    return str(tensor.dtype) == f"torch.{_TORCH_NAMES[header.dtype]}" and tuple(tensor.shape) == header.shape


def tensors_at(memory: memoryview, base: int, tensors: Iterable[TensorHeader]) -> dict[str, torch.Tensor]:
    """Every one of `tensors`, whose data section starts at `base` of `memory` (negative if its start was left out)."""
    return {tensor.name: tensor_at(memory, base + tensor.start, tensor) for tensor in tensors}
