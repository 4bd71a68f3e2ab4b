"""Who watches pages: the interface, and the tracker that does nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from memopt.kernels.kv_cache.page_tags_reference import PageTagCheck
from memopt.kernels.layout import NO_TAG


class PageTracker(Protocol):
    """Told of every allocation; asked once a step, before any page is read or written."""

    @property
    def is_checking(self) -> bool:
        """Whether `check` finds anything: callers skip what only it needs."""
        ...

    def on_allocate(self, pages: Sequence[int]) -> Sequence[int]:
        """A new tag for each page, in force before its first write; NO_TAG from a tracker that has none."""
        ...

    def tag_of(self, page: int) -> int:
        """The tag that the page has now, NO_TAG outside the pool; waits for the device, so only for reports."""
        ...

    def check(self, block_table: Tensor, num_pages: Tensor, expected: Tensor) -> PageTagCheck | None:
        """One launch for B requests (kernels/kv_cache/page_tags.py); results stay on the device. None: not checked.

        They are valid until the next call.
        """
        ...

    @property
    def is_known_clean(self) -> bool:
        """Whether the host knows, without waiting, that the last check flagged nobody: nothing needs masking then."""
        ...


class NoopTracker:
    """No tags, no check, no cost."""

    is_checking = False
    is_known_clean = False

    def on_allocate(self, pages: Sequence[int]) -> Sequence[int]:
        """NO_TAG for each page."""
        return (NO_TAG,) * len(pages)

    def tag_of(self, page: int) -> int:
        """NO_TAG."""
        return NO_TAG

    def check(self, block_table: Tensor, num_pages: Tensor, expected: Tensor) -> PageTagCheck | None:
        """None."""
        return None
