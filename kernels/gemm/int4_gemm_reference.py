"""INT4 x BF16 GEMM in plain torch, written to be read. It defines the result of the other implementations."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.gemm.int4_weight import Int4Weight
from memopt.kernels.gemm.planar import PlanarWeight, checkpoint_weight
from memopt.kernels.gemm.row_tiles import tiled_matmul
from memopt.kernels.int4_reference import unpack_int4
from memopt.kernels.number_reference import bf16_value


def weight_values(weight: Int4Weight | PlanarWeight) -> Tensor:
    """float32 [N, K] of one weight: code * scale, which float32 holds exactly."""
    if isinstance(weight, PlanarWeight):
        weight = checkpoint_weight(weight)
    scales = bf16_value(weight.scale_bits.view(torch.int16))
    codes = unpack_int4(weight.packed).to(torch.float32).view(*scales.shape, -1)
    return (codes * scales[..., None]).flatten(1)


def int4_gemm_reference(x: Tensor, weight: Int4Weight | PlanarWeight, out: Tensor) -> Tensor:
    """out [M, N] = x [M, K] @ weight.T: float32 products and sums, rounded once to the type of `out`."""
    return out.copy_(tiled_matmul(x.to(torch.float32), weight_values(weight)))
