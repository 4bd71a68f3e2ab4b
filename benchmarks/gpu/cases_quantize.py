"""FP8 to INT4 and back to BF16: bytes against the reference, and the share of the memory bandwidth.

Bytes moved are those of the weights, codes and scales; the error figures that rounding also leaves are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.case import GpuCase, Prepared
from memopt.kernels import dequantize_reference, dequantize_triton, fp8_int4_triton, int4_device, int4_reference
from memopt.kernels.fp8_int4_triton import Int4Buffers
from memopt.kernels.int4_spec import BlockShape, Int4Spec, ScaleSearch
from memopt.kernels.layout import (
    CODES_PER_WORD,
    E4M3_MAGNITUDE_MASK,
    E4M3_NAN_MAGNITUDE,
    FP8_BLOCK_COLUMNS,
    FP8_BLOCK_ROWS,
)

BLOCK = (FP8_BLOCK_ROWS, FP8_BLOCK_COLUMNS)
# Eight experts' gate and up projections of GLM-5.2 (2 x 2048 rows of 6144 each): 192 MiB of FP8, beyond the L2 cache.
ROWS, COLUMNS = 8 * 2 * 2048, 6144
GROUP = 32
# The reference is slow: it is asked for these rows only, at both ends.
CHECKED_ROWS = 256
QUANTIZE_GOAL = 0.55
# No goal was set for expanding; both are copies with a conversion.
EXPAND_GOAL = 0.55


def _float8(rows: int, columns: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    device = generator.device
    weight = torch.randint(0, 256, (rows, columns), generator=generator, device=device, dtype=torch.uint8)
    weight.masked_fill_((weight & E4M3_MAGNITUDE_MASK) == E4M3_NAN_MAGNITUDE, 0)
    shape = (-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
    return weight, torch.rand(shape, generator=generator, device=device) * 1e-3 + 1e-5


def _ends(rows: int) -> tuple[slice, slice]:
    size = min(CHECKED_ROWS, rows)
    return slice(0, size), slice((rows - size) // BLOCK[0] * BLOCK[0], rows)


def _quantize(search: ScaleSearch, rows: int, columns: int, generator: torch.Generator) -> Prepared:
    weight, scale = _float8(rows, columns, generator)
    spec = Int4Spec(GROUP, search)
    buffers = Int4Buffers.empty(rows, columns, GROUP, weight.device)

    def check() -> float:
        if int(buffers.flag) != 0:
            return float("inf")
        found, wrong = buffers.rows(), 0
        for part in _ends(rows):
            first = part.start // BLOCK[0]
            scales = scale[first : first + -(-(part.stop - part.start) // BLOCK[0])]
            expected = int4_reference.quantize_int4(weight[part], scales, BLOCK, spec)
            for field in fields(expected):
                ours, theirs = getattr(found, field.name)[part], getattr(expected, field.name)
                wrong += int((ours != theirs).sum())
        return float(wrong)

    return Prepared(
        run=lambda: fp8_int4_triton.launch(weight, scale, BlockShape(*BLOCK), spec, buffers),
        outputs=(buffers.packed, buffers.scale_bits, buffers.group_sums, buffers.row_sums, buffers.updated),
        check=check,
        tolerance=0.0,
        bytes_moved=weight.nbytes + scale.nbytes + buffers.packed.nbytes + buffers.scale_bits.nbytes,
        peers={"torch operations": lambda: int4_device.quantize_int4(weight, scale, BLOCK, spec)},
    )


def _expand_float8(dtype: torch.dtype, rows: int, columns: int, generator: torch.Generator) -> Prepared:
    weight, scale = _float8(rows, columns, generator)
    result = torch.empty(rows, columns, dtype=dtype, device=weight.device)
    flag = torch.zeros(1, dtype=torch.int32, device=weight.device)

    def check() -> float:
        expected = dequantize_reference.dequantize_float8(weight, scale, BLOCK, dtype)
        return float((result.view(torch.int16) != expected.view(torch.int16)).sum()) + float(flag)

    def by_torch() -> None:
        blocks = weight.view(torch.float8_e4m3fn).to(dtype).view(-1, BLOCK[0], columns // BLOCK[1], BLOCK[1])
        torch.mul(blocks, scale[:, None, :, None].to(dtype), out=result.view(blocks.shape))

    return Prepared(
        run=lambda: dequantize_triton.launch_float8(weight, scale, BlockShape(*BLOCK), result, flag),
        outputs=(result,),
        check=check,
        tolerance=0.0,
        bytes_moved=weight.nbytes + scale.nbytes + result.nbytes,
        peers={"torch cast and multiply": by_torch} if rows % BLOCK[0] == columns % BLOCK[1] == 0 else {},
    )


def _expand_int4(dtype: torch.dtype, rows: int, columns: int, generator: torch.Generator) -> Prepared:
    device = generator.device
    packed = torch.randint(
        -(1 << 31), 1 << 31, (rows, columns // CODES_PER_WORD), generator=generator, device=device, dtype=torch.int64
    ).to(torch.int32)
    scales = torch.randn(rows, columns // GROUP, generator=generator, device=device).to(torch.bfloat16)
    result = torch.empty(rows, columns, dtype=dtype, device=device)
    flag = torch.zeros(1, dtype=torch.int32, device=device)

    def check() -> float:
        wrong = 0
        for part in _ends(rows):
            expected = dequantize_reference.dequantize_int4(packed[part], scales[part], GROUP, dtype)
            wrong += int((result[part].view(torch.int16) != expected.view(torch.int16)).sum())
        return float(wrong) + float(flag)

    return Prepared(
        run=lambda: dequantize_triton.launch_int4(packed, scales, GROUP, result, flag),
        outputs=(result,),
        check=check,
        tolerance=0.0,
        bytes_moved=packed.nbytes + scales.nbytes + result.nbytes,
    )


def cases(rows: int = ROWS, columns: int = COLUMNS) -> Iterator[GpuCase]:
    """Rounding with and without a search, and expanding, on `rows` x `columns` weights."""
    searches: tuple[tuple[ScaleSearch, float], ...] = (("absmax", QUANTIZE_GOAL), ("mse-signed", 0.0))
    for search, goal in searches:
        # A search is bound by arithmetic: it has no goal in bytes.
        yield GpuCase(f"fp8_int4/g{GROUP}-{search}", partial(_quantize, search, rows, columns), goal, "bandwidth")
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        yield GpuCase(
            f"dequantize/float8-{name}", partial(_expand_float8, dtype, rows, columns), EXPAND_GOAL, "bandwidth"
        )
        yield GpuCase(
            f"dequantize/int4-g{GROUP}-{name}", partial(_expand_int4, dtype, rows, columns), EXPAND_GOAL, "bandwidth"
        )
