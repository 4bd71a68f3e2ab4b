"""What is known of a page that was not its request's any more, and the events that tell of it."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Literal

from memopt.kernels.kv_cache.page_tags_reference import NO_MISMATCH
from memopt.kernels.layout import NO_TAG
from memopt.runtime.integrity.tracker import PageTracker
from memopt.runtime.kv.block_tables import BlockTables

LOGGER = logging.getLogger("memopt.integrity")
# A check found the page, or the request did as it gave the page back.
EventName = Literal["page_mismatch", "page_lost"]
# The page of a mismatch that is not about one page: a row's count is off, or another rank found it.
NO_PAGE = -1
# Stands for a request: requests have numbers.
PREFIX_INDEX = "prefix index"


@dataclass(frozen=True, slots=True)
class PageMismatch:
    """Request `request_id` was about to read `page` as the `page_index`-th of its sequence, in step `step`.

    `expected`: the tag on record for it; `found`: the one it has. `page_index` is NO_MISMATCH on a rank that found
    nothing itself and aborts because another did; `page` is NO_PAGE there, and where the row's page count was off.
    With event "page_lost" it was about to give `page` back after step `step`, and did not hold it any more; equal tags
    then say that nobody was given the page since. `request_id` is PREFIX_INDEX where the index held it.
    """

    request_id: str
    page_index: int
    page: int
    expected: int
    found: int
    step: int
    event: EventName = "page_mismatch"

    def to_json(self) -> str:
        """One line with fixed keys, in order; tags as hexadecimal text, since JSON readers round above 2**53."""
        return json.dumps(
            {
                "event": self.event,
                "request_id": self.request_id,
                "step": self.step,
                "page_index": self.page_index,
                "page": self.page,
                "expected": f"{self.expected:#018x}",
                "found": f"{self.found:#018x}",
            }
        )


@dataclass(slots=True)
class IntegrityCounts:
    """Counted since the engine began: steps that were checked, requests that did not pass.

    `num_lost_pages`: pages that a request gave back, or the prefix index looked up, and that were not theirs any more.
    """

    num_checks: int = 0
    num_mismatches: int = 0
    num_lost_pages: int = 0


def describe_mismatch(
    tables: BlockTables, tracker: PageTracker, row: int, page_index: int, request_id: str, step: int
) -> PageMismatch:
    """The report of a flagged row; `page_index` is its `first_mismatch`. Reads the device, so only when one was found.

    Call it before the row is dropped.
    """
    if page_index == NO_MISMATCH or page_index >= tables.max_pages:
        return PageMismatch(request_id, page_index, NO_PAGE, NO_TAG, NO_TAG, step)
    page = int(tables.pages[row, page_index])
    expected = int(tables.expected[row, page_index])
    return PageMismatch(request_id, page_index, page, expected, tracker.tag_of(page), step)


def log_mismatch(mismatch: PageMismatch) -> None:
    """The event, as one JSON line at level ERROR of the logger `memopt.integrity`."""
    LOGGER.error(mismatch.to_json())
