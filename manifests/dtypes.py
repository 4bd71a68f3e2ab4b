"""Element types of the safetensors format and their sizes."""

from __future__ import annotations

from math import prod

# safetensors 0.8 `Dtype`, whole-byte types only.
ITEM_SIZE_BYTES: dict[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}


def tensor_size_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Size in bytes of a tensor of safetensors type `dtype` (KeyError if unknown) and `shape`."""
    return prod(shape) * ITEM_SIZE_BYTES[dtype]
