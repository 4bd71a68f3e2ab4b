"""Compares page tags in Triton: one program a request, no atomics, nothing to clear first."""

# Triton compiles these from the types it is called with.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from memopt.kernels.device.current_device import on_tensors_device
from memopt.kernels.kv_cache.page_tags_reference import NO_MISMATCH, PageTagCheck, new_check
from memopt.kernels.layout import NO_TAG

_NO_TAG, _NO_MISMATCH = tl.constexpr(NO_TAG), tl.constexpr(NO_MISMATCH)
# Above every position in a block table.
_NOWHERE = tl.constexpr((1 << 31) - 1)

# Pages that a program compares at once, and how many it gives to a warp: 8 to 16 a thread, their loads all in flight.
MIN_BLOCK_PAGES, MAX_BLOCK_PAGES = 128, 4096
PAGES_A_WARP = 256
MAX_NUM_WARPS = 8


# Sizes change from step to step: one compiled variant serves them all.
@triton.jit(do_not_specialize=["num_physical_pages", "max_pages", "table_stride", "expected_stride"])
def verify_page_tags_kernel(
    block_table, num_pages, tags, expected, flags, first_mismatch, num_physical_pages, max_pages, table_stride,
    expected_stride, BLOCK_PAGES: tl.constexpr,
):  # fmt: skip
    """Flag and first mismatch of request `program_id(0)`."""
    request = tl.program_id(0).to(tl.int64)
    count = tl.load(num_pages + request)
    num_checked = tl.minimum(tl.maximum(count, 0), max_pages)
    lanes = tl.arange(0, BLOCK_PAGES)
    nearest = tl.full([BLOCK_PAGES], _NOWHERE, tl.int32)
    for start in range(0, num_checked, BLOCK_PAGES):
        position = start + lanes
        is_checked = position < num_checked
        page = tl.load(block_table + request * table_stride + position, mask=is_checked, other=-1)
        want = tl.load(expected + request * expected_stride + position, mask=is_checked, other=_NO_TAG)
        is_inside = (page >= 0) & (page < num_physical_pages)
        found = tl.load(tags + page.to(tl.int64), mask=is_inside, other=_NO_TAG)
        is_wrong = is_checked & ((found != want) | (found == _NO_TAG))
        nearest = tl.minimum(nearest, tl.where(is_wrong, position, _NOWHERE))
    first = tl.min(nearest, axis=0)
    first = tl.where((first == _NOWHERE) & (count != num_checked), num_checked, first)
    tl.store(flags + request, (first != _NOWHERE).to(tl.int32))
    tl.store(first_mismatch + request, tl.where(first == _NOWHERE, _NO_MISMATCH, first))


def block_pages(max_pages: int) -> int:
    """Pages that one iteration compares, for tables of `max_pages` columns: a power of two."""
    return min(max(triton.next_power_of_2(max_pages), MIN_BLOCK_PAGES), MAX_BLOCK_PAGES)


def num_warps(num_block_pages: int) -> int:
    """Warps of a program that compares that many pages at once."""
    return min(max(num_block_pages // PAGES_A_WARP, 1), MAX_NUM_WARPS)


@on_tensors_device
def verify_page_tags(
    block_table: Tensor, num_pages: Tensor, tags: Tensor, expected: Tensor, out: PageTagCheck | None = None
) -> PageTagCheck:
    """One flag a request; arguments as for `page_tags.verify_page_tags`."""
    out = new_check(block_table) if out is None else out
    block = block_pages(block_table.shape[1])
    verify_page_tags_kernel[(block_table.shape[0],)](
        block_table, num_pages, tags, expected, out.flags, out.first_mismatch, tags.shape[0], block_table.shape[1],
        block_table.stride(0), expected.stride(0), BLOCK_PAGES=block, num_warps=num_warps(block),
        enable_fp_fusion=False,
    )  # fmt: skip
    return out
