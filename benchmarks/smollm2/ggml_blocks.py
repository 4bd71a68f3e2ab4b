"""The GGML tensor types that SmolLM2's file holds, decoded exactly as ggml defines them.

ggml/src/ggml-common.h (block_q4_1, block_q8_0) and ggml-quants.c (dequantize_row_q4_1, dequantize_row_q8_0) of
ggml-org/llama.cpp: a block is 32 consecutive elements of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from memopt.errors import MalformedError, UnsupportedError

BLOCK_ELEMENTS = 32
_NIBBLE_MASK = 0xF
_NIBBLE_BITS = 4
_F16_BYTES = 2
_F32_BYTES = 4


class GgmlType(IntEnum):
    """Type numbers of `enum ggml_type` (ggml.h); the others are refused."""

    F32 = 0
    Q4_1 = 3
    Q8_0 = 8


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """`elements` of a row take `size_bytes`."""

    elements: int
    size_bytes: int


LAYOUTS = {
    GgmlType.F32: BlockLayout(1, _F32_BYTES),
    # float16 scale, float16 minimum, 32 nibbles: element i in the low, element i + 16 in the high half of byte i.
    GgmlType.Q4_1: BlockLayout(BLOCK_ELEMENTS, 2 * _F16_BYTES + BLOCK_ELEMENTS // 2),
    # float16 scale, 32 signed bytes.
    GgmlType.Q8_0: BlockLayout(BLOCK_ELEMENTS, _F16_BYTES + BLOCK_ELEMENTS),
}


def ggml_type(number: int, tensor: str) -> GgmlType:
    """The type `number` stands for; UnsupportedError naming `tensor` for any that this reader does not decode."""
    try:
        return GgmlType(number)
    except ValueError:
        known = ", ".join(f"{kind.name} ({kind.value})" for kind in GgmlType)
        raise UnsupportedError(f"GGML type {number} is not read; known: {known}", tensor=tensor) from None


def stored_size_bytes(kind: GgmlType, shape: tuple[int, ...], tensor: str) -> int:
    """Bytes of a tensor of `shape` (rows last-dimension contiguous); MalformedError if its rows are no whole blocks."""
    layout = LAYOUTS[kind]
    columns = shape[-1]
    if columns % layout.elements:
        raise MalformedError(f"{columns} columns are no whole {kind.name} blocks of {layout.elements}", tensor=tensor)
    num_elements = 1
    for size in shape:
        num_elements *= size
    return num_elements // layout.elements * layout.size_bytes


def decode(kind: GgmlType, raw: bytes | memoryview, shape: tuple[int, ...]) -> np.ndarray:
    """float32 array of `shape` from a tensor's bytes, in float32 arithmetic as ggml's own loops.

    Q4_1: nibble * scale + minimum. Q8_0: byte * scale. Both are rounded to float32 after each step.
    """
    if kind is GgmlType.F32:
        return np.frombuffer(raw, "<f4").reshape(shape).copy()
    layout = LAYOUTS[kind]
    blocks = np.frombuffer(raw, np.uint8).reshape(-1, layout.size_bytes)
    scale = blocks[:, :_F16_BYTES].copy().view("<f2").astype(np.float32)
    if kind is GgmlType.Q8_0:
        return (blocks[:, _F16_BYTES:].view(np.int8).astype(np.float32) * scale).reshape(shape)
    minimum = blocks[:, _F16_BYTES : 2 * _F16_BYTES].copy().view("<f2").astype(np.float32)
    packed = blocks[:, 2 * _F16_BYTES :]
    codes = np.concatenate([packed & _NIBBLE_MASK, packed >> _NIBBLE_BITS], axis=1).astype(np.float32)
    return (codes * scale + minimum).reshape(shape)
