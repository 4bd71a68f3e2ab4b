"""Verifies that the pages a step is about to read still belong to the requests that read them.

Every physical page has a 64-bit tag that changes when the page is given to somebody else. A request records the tags of
its pages as it gets them. The check reads page ids from the block table that attention will read, so that it also finds
a table that is wrong; what it does not find is in docs/page-life.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.errors import ShapeError
from memopt.kernels.device.tensor_checks import require_tensor
from memopt.kernels.kv_cache import page_tags_cpu, page_tags_reference
from memopt.kernels.kv_cache.page_tags_reference import PageTagCheck


def verify_page_tags(
    block_table: Tensor, num_pages: Tensor, tags: Tensor, expected: Tensor, out: PageTagCheck | None = None
) -> PageTagCheck:
    """One flag for each of B requests: 1 when any of its pages has another tag than it recorded.

    `block_table` int32 [B, max_pages]: page ids, `num_pages` int32 [B] of them used; 0, a padding request, never flags.
    `tags` int64 [num_physical_pages]. `expected` int64 [B, max_pages]: the recorded tags. Rows of the two tables may be
    strided. A page id outside the pool, a page or a record without a tag (NO_TAG), and a count below 0 or above
    max_pages are mismatches. `out`: results to reuse, every entry of which is written. Raises ShapeError for tensors
    that do not fit. The host never waits: results stay on the device, for the copy that fetches the sampled tokens.
    """
    require_tensor("block_table", block_table, (None, None), torch.int32, contiguous=False)
    num_requests, max_pages = block_table.shape
    require_tensor("num_pages", num_pages, (num_requests,), torch.int32, like=block_table)
    require_tensor("tags", tags, (None,), torch.int64, like=block_table)
    require_tensor("expected", expected, (num_requests, max_pages), torch.int64, like=block_table, contiguous=False)
    for name, table in (("block_table", block_table), ("expected", expected)):
        if max_pages > 1 and table.stride(1) != 1:
            raise ShapeError(
                f"{name} {list(table.shape)} has strides {list(table.stride())}, but its rows must be contiguous",
                remedy="call .contiguous() first",
            )
    if tags.shape[0] == 0:
        raise ShapeError("tags [0]: a pool has at least one page")
    if out is None:
        out = page_tags_reference.new_check(block_table)
    else:
        for name, result in (("out.flags", out.flags), ("out.first_mismatch", out.first_mismatch)):
            require_tensor(name, result, (num_requests,), torch.int32, like=block_table)
    if num_requests == 0:
        return out
    if block_table.is_cuda:
        from memopt.kernels.kv_cache import page_tags_triton

        return page_tags_triton.verify_page_tags(block_table, num_pages, tags, expected, out)
    return page_tags_cpu.verify_page_tags(block_table, num_pages, tags, expected, out)
