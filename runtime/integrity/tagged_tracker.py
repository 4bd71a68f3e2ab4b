"""The tracker that gives every page a tag that no page had before, and compares tags before a step reads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from memopt.errors import PageError
from memopt.kernels.kv_cache.page_tags import verify_page_tags
from memopt.kernels.kv_cache.page_tags_cpu import bound_check
from memopt.kernels.kv_cache.page_tags_reference import PageTagCheck
from memopt.kernels.layout import NO_TAG, TAG_COUNTER_BITS, TAG_SERIES_BITS

# Numbers the trackers of this process. A tag is its tracker's number above, and a count of allocations below, so that
# no two pages of a process ever have the same tag, whichever engine they belong to, and equal ranks give equal tags.
_series = itertools.count(1)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A check whose arguments were found right; `run` repeats it on the tensors' present values, into `out`.

    On the CPU `run` returns how many requests are flagged.
    """

    block_table: Tensor
    num_pages: Tensor
    expected: Tensor
    out: PageTagCheck
    run: Callable[[], int | PageTagCheck]


class TaggedTracker:
    """Tags int64 [num_pages] on the pools' device, NO_TAG for a page that was never given out.

    A tag is written on the current stream, which must be the one that runs the model: so it is in force before the new
    owner's first write. Raises PageError when 2**40 allocations, or 2**23 trackers in one process, are used up: a tag
    that came round again could pass for another.
    """

    is_checking = True

    def __init__(self, num_pages: int, device: torch.device | str, *, tags: Tensor | None = None) -> None:
        """`tags` int64 [num_pages] on `device`: where to keep them, for others to read; None: memory of its own."""
        self.tags = torch.empty(num_pages, dtype=torch.int64, device=device) if tags is None else tags
        self.tags.fill_(NO_TAG)
        self._host_tags = self.tags.numpy() if self.tags.device.type == "cpu" else None
        series = next(_series)
        if series >= 1 << TAG_SERIES_BITS:
            raise PageError(f"{series} trackers of page tags in one process", remedy="start a new process")
        self._last_tag = series << TAG_COUNTER_BITS
        self._largest_tag = self._last_tag | ((1 << TAG_COUNTER_BITS) - 1)
        self._prepared: _Prepared | None = None
        self._is_known_clean = False

    def on_allocate(self, pages: Sequence[int]) -> Sequence[int]:
        """New tags for the pages, written with one copy and one launch, however many there are."""
        first = self._last_tag + 1
        end = first + len(pages)
        if end > self._largest_tag + 1:
            raise PageError(
                f"page tags are used up after {self._largest_tag & ((1 << TAG_COUNTER_BITS) - 1)} allocations",
                remedy="start a new engine",
            )
        self._last_tag = end - 1
        new_tags = range(first, end)
        if self._host_tags is not None:
            for page, tag in zip(pages, new_tags, strict=True):
                self._host_tags[page] = tag
        else:
            host = torch.tensor([list(pages), list(new_tags)], dtype=torch.int64)
            places, tags = host.to(self.tags.device, non_blocking=True).unbind(0)
            self.tags[places] = tags
        return new_tags

    def tag_of(self, page: int) -> int:
        """The tag that the page has now, NO_TAG outside the pool; waits for the device, so only for reports."""
        return int(self.tags[page]) if 0 <= page < self.tags.shape[0] else NO_TAG

    @property
    def is_known_clean(self) -> bool:
        """Whether the host knows, without waiting, that the last check flagged nobody; never on a GPU."""
        return self._is_known_clean

    def check(self, block_table: Tensor, num_pages: Tensor, expected: Tensor) -> PageTagCheck:
        """`verify_page_tags` of B requests; the results are valid until the next call.

        The tensors of the call before (an engine's tables, changed in place) are not looked at again: on the CPU that
        is most of the time that a check takes.
        """
        prepared = self._prepared
        if (
            prepared is None
            or block_table is not prepared.block_table
            or num_pages is not prepared.num_pages
            or expected is not prepared.expected
        ):
            prepared = self._prepared = self._prepare(block_table, num_pages, expected)
        # A number from the CPU, the tensors themselves from a GPU.
        self._is_known_clean = prepared.run() == 0
        return prepared.out

    def _prepare(self, block_table: Tensor, num_pages: Tensor, expected: Tensor) -> _Prepared:
        tags = self.tags
        out = verify_page_tags(block_table, num_pages, tags, expected)
        run: Callable[[], int | PageTagCheck]
        if self._host_tags is not None:
            run = bound_check(block_table, num_pages, tags, expected, out)
        else:
            run = partial(verify_page_tags, block_table, num_pages, tags, expected, out)
        return _Prepared(block_table, num_pages, expected, out, run)
