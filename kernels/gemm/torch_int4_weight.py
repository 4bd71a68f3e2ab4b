"""INT4 weights in the form of torch's packed CPU kernel, and the product with them: the fastest one at few tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from memopt.errors import UnsupportedError
from memopt.kernels.gemm.int4_weight import Int4Weight
from memopt.kernels.int4_reference import unpack_int4
from memopt.kernels.layout import BF16_BITS, BITS_PER_BYTE, INT4_CODE_OFFSET

# What aten::_weight_int4pack_mm_for_cpu takes (aten/src/ATen/native/LinearAlgebra.cpp): groups of these sizes, rows in
# multiples of 16. The inner tile counts for CUDA alone.
TORCH_GROUP_SIZES = (32, 64, 128, 256)
TORCH_ROW_MULTIPLE = 16
_INNER_TILES = 1


@dataclass(frozen=True)
class TorchInt4Weight:
    """A weight [N, K], or a stack with a leading E, in an order that torch chose for this machine.

    `packed` uint8 [N, K / 2]; `scales_and_zeros` BF16 [K / g, N, 2], the zeros all 0.
    """

    packed: Tensor
    scales_and_zeros: Tensor
    num_rows: int
    num_columns: int
    group_size: int

    @property
    def num_experts(self) -> int | None:
        """E of a stack of weights, None for a single one."""
        return self.packed.shape[0] if self.packed.ndim == 3 else None

    @property
    def size_bytes(self) -> int:
        """Bytes of codes, scales and zeros together."""
        return self.packed.numel() + self.scales_and_zeros.numel() * BF16_BITS // BITS_PER_BYTE

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return self.packed.device

    @cached_property
    def experts(self) -> tuple[TorchInt4Weight, ...]:
        """The weights of a stack, as views."""
        return tuple(self.expert(index) for index in range(self.packed.shape[0]))

    def expert(self, index: int) -> TorchInt4Weight:
        """One weight of a stack, as a view."""
        return TorchInt4Weight(
            self.packed[index], self.scales_and_zeros[index], self.num_rows, self.num_columns, self.group_size
        )


def torch_int4_weight(weight: Int4Weight) -> TorchInt4Weight:
    """The same codes and scales for torch's packed kernel, on the CPU. Int4Weight itself serves where this is refused.

    Raises UnsupportedError for rows that 16 does not divide, or a channel scale over columns that 32 does not.
    """
    group = weight.group_size or next((size for size in TORCH_GROUP_SIZES[::-1] if weight.num_columns % size == 0), 0)
    if weight.num_rows % TORCH_ROW_MULTIPLE or group not in TORCH_GROUP_SIZES or weight.device.type != "cpu":
        raise UnsupportedError(
            f"torch's packed INT4 kernel does not take [{weight.num_rows}, {weight.num_columns}] in groups of "
            f"{weight.group_size or 'a row'} on {weight.device}",
            remedy="pass the weight as it is",
        )
    if weight.num_experts is None:
        packed, scales = _pack_one(weight, group)
        return TorchInt4Weight(packed, scales, weight.num_rows, weight.num_columns, group)
    packed, scales = _pack_one(weight.expert(0), group)
    # One expert at a time into place: a stack is never there in this form twice.
    packed, scales = (part.new_empty(weight.num_experts, *part.shape) for part in (packed, scales))
    for index in range(weight.num_experts):
        packed[index], scales[index] = _pack_one(weight.expert(index), group)
    return TorchInt4Weight(packed, scales, weight.num_rows, weight.num_columns, group)


def _pack_one(weight: Int4Weight, group: int) -> tuple[Tensor, Tensor]:
    nibbles = unpack_int4(weight.packed).to(torch.int32) + INT4_CODE_OFFSET
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles, _INNER_TILES)
    scales = weight.scale_bits.view(torch.bfloat16).T
    if weight.group_size is None:
        scales = scales.expand(weight.num_columns // group, -1)
    return packed, torch.stack((scales, torch.zeros_like(scales)), dim=-1).contiguous()


def torch_int4_gemm(x: Tensor, weight: TorchInt4Weight, out: Tensor) -> Tensor:
    """out [M, N] = x [M, K] @ weight.T: x is rounded to BF16 (torch's float32 kernel takes 27 times as long).

    Checked by `int4_gemm`, which documents it.
    """
    return out.copy_(torch_int4_product(x.to(torch.bfloat16), weight))


def torch_int4_product(x: Tensor, weight: TorchInt4Weight) -> Tensor:
    """[M, N], BF16, of x [M, K], BF16."""
    # Not by torch.ops.aten: that goes through Python, a fifth of a small product's time.
    product: Tensor = torch._weight_int4pack_mm_for_cpu(x, weight.packed, weight.group_size, weight.scales_and_zeros)
    return product
