"""INT4 weights in the form that releases store: words along `in`, BF16 scales beside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from memopt.errors import ShapeError
from memopt.kernels.checks import check_packed
from memopt.kernels.layout import BF16_BITS, BITS_PER_BYTE, CODES_PER_WORD, INT4_BITS


@dataclass(frozen=True)
class Int4Weight:
    """`packed` int32 [N, K / 8] or [E, N, K / 8] (compressed-tensors "pack-quantized"); `scale_bits` BF16 bits as int16
    or bfloat16 [N, G] or [E, N, G]; `group_size` weights a scale along K, None: the whole row.

    Raises ShapeError when the two do not fit each other, are empty, or are not contiguous.
    """

    packed: Tensor
    scale_bits: Tensor
    group_size: int | None

    def __post_init__(self) -> None:
        packed, scale = self.packed, self.scale_bits
        if packed.dtype != torch.int32 or scale.dtype not in (torch.int16, torch.bfloat16):
            raise ShapeError(
                f"packed codes are {packed.dtype} and scales {scale.dtype}, but int32 and int16 or bfloat16 are needed"
            )
        if packed.ndim not in (2, 3) or scale.ndim != packed.ndim or packed.shape[:-2] != scale.shape[:-2]:
            raise ShapeError(
                f"packed codes {list(packed.shape)} and scales {list(scale.shape)} must both be [N, ..] or [E, N, ..]"
            )
        if not packed.numel():
            raise ShapeError(f"packed codes {list(packed.shape)} hold no weights")
        check_packed(tuple(packed.shape[-2:]), tuple(scale.shape[-2:]), self.group_size)
        if not (packed.is_contiguous() and scale.is_contiguous()):
            raise ShapeError("packed codes and scales must be contiguous", remedy="call .contiguous() first")
        if packed.device != scale.device:
            raise ShapeError(f"packed codes are on {packed.device}, their scales on {scale.device}")

    @property
    def num_experts(self) -> int | None:
        """E of a stack of weights, None for a single one."""
        return self.packed.shape[0] if self.packed.ndim == 3 else None

    @property
    def num_rows(self) -> int:
        """N, along `out`."""
        return self.packed.shape[-2]

    @property
    def num_columns(self) -> int:
        """K, along `in`."""
        return self.packed.shape[-1] * CODES_PER_WORD

    @property
    def size_bytes(self) -> int:
        """Bytes of codes and scales together."""
        return (self.packed.numel() * CODES_PER_WORD * INT4_BITS + self.scale_bits.numel() * BF16_BITS) // BITS_PER_BYTE

    @property
    def device(self) -> torch.device:
        """Where the codes lie."""
        return self.packed.device

    def expert(self, index: int) -> Int4Weight:
        """One weight of a stack, as a view."""
        return Int4Weight(self.packed[index], self.scale_bits[index], self.group_size)
