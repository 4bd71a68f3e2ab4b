"""Projections by the form of their weight: dense, INT4, FP8; stacked, and cut by columns over ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from memopt.errors import ShapeError
from memopt.kernels.dequantize import dequantize_float8
from memopt.kernels.gemm.int4_gemm import AnyInt4Weight, int4_gemm
from memopt.kernels.gemm.row_tiles import tiled_matmul
from memopt.runtime.model.linear import Linear
from memopt.runtime.parallel.communicator import Communicator

# FP8 weights that are expanded at once: 4 MiB of float32, which stays in a core's cache.
TILE_WEIGHTS = 1 << 20


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """A weight [N, K] of the activations' type, and perhaps a bias [N]."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """N."""
        return self.weight.shape[0]

    @property
    def num_columns(self) -> int:
        """K."""
        return self.weight.shape[1]

    @property
    def size_bytes(self) -> int:
        """Bytes of weight and bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """[M, N] of x [M, K]; row-invariant for float32 on the CPU."""
        product = tiled_matmul(x, self.weight)
        return product if self.bias is None else product + self.bias


@dataclass(frozen=True, slots=True)
class Int4Linear:
    """An INT4 weight in a form that its device multiplies, and perhaps a bias [N]."""

    weight: AnyInt4Weight
    bias: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """N."""
        return self.weight.num_rows

    @property
    def num_columns(self) -> int:
        """K."""
        return self.weight.num_columns

    @property
    def size_bytes(self) -> int:
        """Bytes of codes, scales and bias."""
        return self.weight.size_bytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """[M, N] of x [M, K]."""
        product = int4_gemm(x.contiguous(), self.weight)
        return product if self.bias is None else product + self.bias


@dataclass(frozen=True, slots=True)
class Fp8BlockLinear:
    """e4m3 codes [N, K] with a float32 scale for each `block` (rows, columns); expanded a few rows at a time.

    `scale_inv` float32 [ceil(N / rows), ceil(K / columns)], multiplied with the codes. A weight's value is the product
    rounded to BF16, as `memopt dequantize` and engines that widen on load have it.
    """

    codes: Tensor
    scale_inv: Tensor
    block: tuple[int, int]
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        wanted = [-(-size // block) for size, block in zip(self.codes.shape, self.block, strict=True)]
        if list(self.scale_inv.shape) != wanted or self.scale_inv.dtype != torch.float32:
            raise ShapeError(
                f"FP8 scales are {self.scale_inv.dtype} {list(self.scale_inv.shape)}, but a weight "
                f"{list(self.codes.shape)} in blocks of {list(self.block)} needs float32 {wanted}"
            )

    @property
    def num_rows(self) -> int:
        """N."""
        return self.codes.shape[0]

    @property
    def num_columns(self) -> int:
        """K."""
        return self.codes.shape[1]

    @property
    def size_bytes(self) -> int:
        """Bytes of codes, scales and bias."""
        return self.codes.nbytes + self.scale_inv.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """[M, N] of x [M, K]; row-invariant for float32 on the CPU."""
        block_rows = self.block[0]
        step = max(1, TILE_WEIGHTS // (self.num_columns * block_rows)) * block_rows
        product = x.new_empty(x.shape[0], self.num_rows)
        for first in range(0, self.num_rows, step):
            rows = slice(first, first + step)
            scales = self.scale_inv[first // block_rows : -(-(first + step) // block_rows)]
            weight = dequantize_float8(self.codes[rows], scales, self.block, torch.bfloat16)
            product[:, rows] = tiled_matmul(x, weight.to(x.dtype))
        return product if self.bias is None else product + self.bias


@dataclass(frozen=True, slots=True)
class StackedLinear:
    """Projections of one x whose results stand side by side: for parts whose weights cannot be joined."""

    parts: tuple[Linear, ...]

    @property
    def num_rows(self) -> int:
        """N of all parts together."""
        return sum(part.num_rows for part in self.parts)

    @property
    def num_columns(self) -> int:
        """K, the same of all."""
        return self.parts[0].num_columns

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.size_bytes for part in self.parts)

    def __call__(self, x: Tensor) -> Tensor:
        """[M, N] of x [M, K]."""
        return torch.cat([part(x) for part in self.parts], dim=1)


@dataclass(frozen=True, slots=True)
class WrappedLinear:
    """Sizes of a projection that does more than the one in it, `linear`."""

    linear: Linear

    @property
    def num_rows(self) -> int:
        """N."""
        return self.linear.num_rows

    @property
    def num_columns(self) -> int:
        """K of this rank."""
        return self.linear.num_columns

    @property
    def size_bytes(self) -> int:
        """Bytes on this rank."""
        return self.linear.size_bytes


@dataclass(frozen=True, slots=True)
class RowParallelLinear(WrappedLinear):
    """A projection whose columns are cut over ranks: each multiplies its part of x, and the results are summed.

    Megatron's name (arXiv 1909.08053): "row" of the transposed weight.
    """

    communicator: Communicator

    def __call__(self, x: Tensor) -> Tensor:
        """[M, N], the same on all ranks, of this rank's x [M, K]."""
        return self.communicator.sum(self.linear(x))
