"""Compares the tags of the pages that a step will read with the tags that its requests recorded: plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from memopt.kernels.layout import NO_TAG

# Position of the first mismatch of a request that has none.
NO_MISMATCH = -1


@dataclass(frozen=True, slots=True)
class PageTagCheck:
    """What `verify_page_tags` found, one entry a request, on the device that holds the block table."""

    flags: Tensor  # int32 [B], 1: the request must be aborted
    first_mismatch: Tensor  # int32 [B], index into the request's row of the block table, NO_MISMATCH if none


def new_check(block_table: Tensor) -> PageTagCheck:
    """Uninitialized results for the requests of a block table [B, max_pages]."""
    num_requests = block_table.shape[0]
    return PageTagCheck(*(torch.empty(num_requests, dtype=torch.int32, device=block_table.device) for _ in range(2)))


def verify_page_tags(
    block_table: Tensor, num_pages: Tensor, tags: Tensor, expected: Tensor, out: PageTagCheck | None = None
) -> PageTagCheck:
    """One flag a request; arguments as for `page_tags.verify_page_tags`. Reads every entry of the table at once."""
    out = new_check(block_table) if out is None else out
    max_pages = block_table.shape[1]
    positions = torch.arange(max_pages, device=block_table.device)
    num_checked = num_pages.clamp(0, max_pages)
    is_checked = positions[None, :] < num_checked[:, None]
    is_inside = is_checked & (block_table >= 0) & (block_table < tags.shape[0])
    found = tags[torch.where(is_inside, block_table, 0).to(torch.int64)]
    found = torch.where(is_inside, found, NO_TAG)
    is_wrong = is_checked & ((found != expected) | (found == NO_TAG))
    # A count that no row of the table can have: what lies past the row cannot be checked.
    is_wrong = torch.cat((is_wrong, (num_pages != num_checked)[:, None]), dim=1)
    ends = torch.cat((positions.expand_as(block_table), num_checked[:, None].to(positions.dtype)), dim=1)
    first = torch.where(is_wrong, ends, max_pages + 1).amin(dim=1)
    out.flags.copy_(is_wrong.any(dim=1))
    out.first_mismatch.copy_(torch.where(first > max_pages, NO_MISMATCH, first))
    return out
