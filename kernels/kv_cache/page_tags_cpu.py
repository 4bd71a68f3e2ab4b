"""Compares page tags on the CPU: one numba loop over the requests' pages, where the reference takes 30 passes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from torch import Tensor

from memopt.kernels import layout
from memopt.kernels.compile_cache import CompiledKernel, compiled, source_digest
from memopt.kernels.kv_cache import page_tags_reference
from memopt.kernels.kv_cache.page_tags_reference import NO_MISMATCH, PageTagCheck, new_check
from memopt.kernels.layout import NO_TAG


@cache
def verify_rows_entry() -> CompiledKernel:
    """The loop, compiled; it returns how many requests are flagged.

    cpu_entry.py says why it closes over a digest of its sources.
    """
    key = source_digest(str(layout.__file__), str(page_tags_reference.__file__), __file__)

    @compiled
    def verify_rows(block_table: Any, num_pages: Any, tags: Any, expected: Any, flags: Any, first_mismatch: Any) -> Any:
        key  # noqa: B018 - makes it a closure variable
        num_flagged = 0
        for request in range(block_table.shape[0]):
            count = num_pages[request]
            num_checked = min(max(count, 0), block_table.shape[1])
            first = NO_MISMATCH
            for position in range(num_checked):
                page = block_table[request, position]
                is_inside = 0 <= page < tags.shape[0]
                found = tags[page] if is_inside else NO_TAG
                if found == NO_TAG or found != expected[request, position]:
                    first = position
                    break
            if first == NO_MISMATCH and count != num_checked:
                first = num_checked
            flags[request] = first != NO_MISMATCH
            first_mismatch[request] = first
            num_flagged += first != NO_MISMATCH
        return num_flagged

    return verify_rows


def verify_page_tags(
    block_table: Tensor, num_pages: Tensor, tags: Tensor, expected: Tensor, out: PageTagCheck | None = None
) -> PageTagCheck:
    """One flag a request; arguments as for `page_tags.verify_page_tags`. A request's first mismatch ends its row."""
    out = new_check(block_table) if out is None else out
    tensors = (block_table, num_pages, tags, expected, out.flags, out.first_mismatch)
    verify_rows_entry()(*(tensor.numpy() for tensor in tensors))
    return out


def bound_check(
    block_table: Tensor, num_pages: Tensor, tags: Tensor, expected: Tensor, out: PageTagCheck
) -> Callable[[], int]:
    """`verify_page_tags` of these tensors as a call without arguments, for the values that they have at each call.

    The call returns how many requests are flagged: on the CPU that is known at once. The tensors are taken as checked
    (`page_tags.verify_page_tags`); finding their memory is most of what a check costs. The loop runs once here, so that
    it is compiled, and what stands around it for a cache that cannot be read is out of the way.
    """
    tensors = (block_table, num_pages, tags, expected, out.flags, out.first_mismatch)
    arrays = [tensor.numpy() for tensor in tensors]
    verify_rows = verify_rows_entry()
    verify_rows(*arrays)
    return partial(verify_rows.dispatcher, *arrays)
