"""Tensors that end where the memory of the process ends: reading or writing past them kills it, on the CPU too.

For tests in Triton's interpreter, whose loads past a tensor's end otherwise find somebody else's bytes and no fault.
"""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

_NO_ACCESS = 0  # PROT_NONE
_libc = ctypes.CDLL(None, use_errno=True)


def guarded(tensor: Tensor) -> Tensor:
    """A contiguous copy of `tensor`, which must hold something, right before a page that nobody may touch."""
    num_bytes = tensor.numel() * tensor.element_size()
    mapped_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    region = mmap.mmap(-1, mapped_bytes + mmap.PAGESIZE)
    end = ctypes.addressof(ctypes.c_char.from_buffer(region)) + mapped_bytes
    if _libc.mprotect(ctypes.c_void_p(end), ctypes.c_size_t(mmap.PAGESIZE), _NO_ACCESS):
        raise OSError(ctypes.get_errno(), "mprotect")
    copy = torch.frombuffer(region, dtype=tensor.dtype, count=tensor.numel(), offset=mapped_bytes - num_bytes)
    return copy.view(tensor.shape).copy_(tensor)
