"""FP8 or BF16 rows to INT4 in one pass on the GPU: same bytes as int4_reference.py, the error figures included."""

# mypy: allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from memopt.errors import ShapeError
from memopt.kernels import int4_device
from memopt.kernels.checks import check_group, check_source
from memopt.kernels.device.capability import has_capability
from memopt.kernels.device.current_device import on_tensors_device
from memopt.kernels.device.half_pairs import ASSEMBLY_CAPABILITY
from memopt.kernels.float8_reference import stored_bits
from memopt.kernels.int4_rounding_triton import CHUNK_WEIGHTS
from memopt.kernels.int4_spec import SCALE_GRID, BlockShape, Int4Rows, Int4Spec
from memopt.kernels.int4_tiles_triton import quantize_groups, quantize_long_groups, sum_rows
from memopt.kernels.layout import BITS_PER_BYTE, CODES_PER_WORD, GPU_LOAD_BYTES


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program rounds: `rows` rows of `row_groups` adjacent groups, with `num_warps` warps."""

    rows: int
    row_groups: int
    num_warps: int


# Groups that stay in registers; at 128 they would spill (255 registers and 88 bytes on sm_90).
# Two groups a thread where registers allow it; with one, ptxas for sm_100 spills in the kernel for long groups.
TILES = {32: Tile(rows=8, row_groups=32, num_warps=4), 64: Tile(rows=8, row_groups=16, num_warps=4)}
LONG_TILE = Tile(rows=16, row_groups=16, num_warps=8)
# A thread a row: few rows a program, or there would be too few programs.
CHANNEL_TILE = Tile(rows=32, row_groups=1, num_warps=1)
# What the search tries, the absmax scale itself first.
SEARCH_FACTORS = (1.0, *SCALE_GRID)
ROW_SUM_ROWS = 32
ROW_SUM_STEP = 16


@dataclass(frozen=True, slots=True)
class Int4Buffers:
    """What the kernels write for R rows of G groups, and the factors that they read.

    `packed` int32 [R, C / 8]; `scale_bits` int16 [R, G]; `group_sums` float32 [2, R, G] and `row_sums` float64 [2, R]
    of d * d and w * w; `updated` int32 [2 R + 1]: the rows' largest d * d (bits of float32), their numbers of clipped
    weights, and the flag.
    """

    packed: Tensor
    scale_bits: Tensor
    group_sums: Tensor
    row_sums: Tensor
    updated: Tensor
    factors: Tensor

    @classmethod
    def empty(cls, rows: int, columns: int, group: int, device: torch.device) -> Int4Buffers:
        """Buffers for rows of `columns` weights in groups of `group`."""
        groups = columns // group
        return cls(
            packed=torch.empty(rows, columns // CODES_PER_WORD, dtype=torch.int32, device=device),
            scale_bits=torch.empty(rows, groups, dtype=torch.int16, device=device),
            group_sums=torch.empty(2, rows, groups, dtype=torch.float32, device=device),
            row_sums=torch.empty(2, rows, dtype=torch.float64, device=device),
            updated=torch.empty(2 * rows + 1, dtype=torch.int32, device=device),
            factors=torch.tensor(SEARCH_FACTORS, dtype=torch.float32, device=device),
        )

    @property
    def max_square(self) -> Tensor:
        """int32 [R]."""
        return self.updated[: self.packed.shape[0]]

    @property
    def num_clipped(self) -> Tensor:
        """int32 [R]."""
        return self.updated[self.packed.shape[0] : -1]

    @property
    def flag(self) -> Tensor:
        """int32 [1]: not 0 when nothing here may be used."""
        return self.updated[-1:]

    def rows(self) -> Int4Rows[Tensor]:
        """The results under the names of every implementation."""
        return Int4Rows(
            packed=self.packed,
            scale_bits=self.scale_bits,
            sq_error=self.row_sums[0],
            energy=self.row_sums[1],
            # The root of a rounded square is the number itself, barring underflow (S. Boldo, FLoC VSTTE 2015).
            max_error=self.max_square.view(torch.float32).to(torch.float64).sqrt().to(torch.float32),
            num_clipped=self.num_clipped.to(torch.int64),
        )


def tile_of(group_size: int | None) -> Tile:
    """The tile for groups of `group_size` weights, None for whole rows."""
    return CHANNEL_TILE if group_size is None else TILES.get(group_size, LONG_TILE)


def quantize_int4(
    weight: Tensor,
    block_scale: Tensor | None,
    block: tuple[int, int] | None,
    spec: Int4Spec,
    importance: Tensor | None = None,
) -> Int4Rows[Tensor]:
    """Rounds a chunk of rows to INT4 on the device that holds it; results stay there.

    Arguments, errors and bytes as for `int4_reference.quantize_int4`. A chunk with a weight that is not finite, or with
    scales outside SAFE_SCALE_MIN..SAFE_SCALE_MAX (int4_rounding_triton.py), is given to `int4_device`, which names the
    weight or rounds the chunk more slowly; so is every chunk with an `importance`, which the kernels do not read. Waits
    for the device once.
    """
    if importance is not None:
        return int4_device.quantize_int4(weight, block_scale, block, spec, importance)
    stored_bits(weight[:0])
    scale_shape = None if block_scale is None else tuple(block_scale.shape)
    shape = check_source(tuple(weight.shape), weight.element_size() * BITS_PER_BYTE, scale_shape, block)
    group = check_group(weight.shape[1], spec)
    if block_scale is not None and block_scale.dtype != torch.float32:
        raise ShapeError(f"a block scale is {block_scale.dtype}, but float32 is needed", remedy="convert it first")
    buffers = Int4Buffers.empty(weight.shape[0], weight.shape[1], group, weight.device)
    launch(_aligned(weight), block_scale, shape, spec, buffers)
    if int(buffers.flag) != 0:
        return int4_device.quantize_int4(weight, block_scale, block, spec)
    return buffers.rows()


def _aligned(weight: Tensor) -> Tensor:
    """`weight`, its rows one after another from an address on that 16-byte loads divide."""
    return (
        weight.contiguous()
        if weight.data_ptr() % GPU_LOAD_BYTES == 0
        else weight.clone(memory_format=torch.contiguous_format)
    )


@on_tensors_device
def launch(weight: Tensor, block_scale: Tensor | None, block: BlockShape, spec: Int4Spec, buffers: Int4Buffers) -> None:
    """Starts the kernels on a checked chunk, contiguous and aligned to 16 bytes; nothing waits for the device.

    What is in `buffers` may be used when its flag is 0 afterwards.
    """
    rows, columns = weight.shape
    groups = buffers.scale_bits.shape[1]
    group = columns // groups
    is_fp8 = block_scale is not None
    buffers.updated.zero_()
    tile = tile_of(spec.group_size)
    is_short = spec.group_size in TILES
    kernel = quantize_groups if is_short else quantize_long_groups
    size = {"GROUP": group} if is_short else {"group_size": group, "HAS_TAIL": group % CHUNK_WEIGHTS != 0}
    kernel[(triton.cdiv(rows, tile.rows), triton.cdiv(groups, tile.row_groups))](
        weight.view(torch.int32),
        None if block_scale is None else block_scale.contiguous(),
        None if spec.scale_search == "absmax" else buffers.factors,
        buffers.packed,
        buffers.scale_bits,
        buffers.group_sums,
        buffers.max_square,
        buffers.num_clipped,
        buffers.flag,
        rows,
        groups,
        1 if block_scale is None else block_scale.shape[1],
        **size,
        IS_FP8=is_fp8,
        SCALE_ROWS=block.rows,
        SCALE_COLUMNS=block.columns if block.columns < columns else 0,
        ONE_SCALE=block.columns >= columns or block.columns % CHUNK_WEIGHTS == 0,
        SEARCH=spec.scale_search,
        NORM=spec.error_norm,
        GRID=len(SEARCH_FACTORS),
        ROWS=tile.rows,
        ROW_GROUPS=tile.row_groups,
        USE_ASSEMBLY=has_capability(weight.device, ASSEMBLY_CAPABILITY),
        num_warps=tile.num_warps,
        enable_fp_fusion=False,
    )
    sum_rows[(triton.cdiv(rows, ROW_SUM_ROWS), 2)](
        buffers.group_sums,
        buffers.row_sums,
        rows,
        groups,
        ROWS=ROW_SUM_ROWS,
        STEP=ROW_SUM_STEP,
        num_warps=1,
        enable_fp_fusion=False,
    )
