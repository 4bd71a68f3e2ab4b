"""From the name of a tracker to the tracker."""

from __future__ import annotations

from typing import Literal

import torch

from memopt.errors import UsageError
from memopt.runtime.integrity.tagged_tracker import TaggedTracker
from memopt.runtime.integrity.tracker import NoopTracker, PageTracker

TrackerName = Literal["noop", "tagged"]


def choose_tracker(name: str, num_pages: int, device: torch.device | str) -> PageTracker:
    """The tracker of that name for a pool of `num_pages`. UsageError for a name that is neither noop nor tagged."""
    if name == "noop":
        return NoopTracker()
    if name == "tagged":
        return TaggedTracker(num_pages, device)
    raise UsageError(f"integrity is {name!r}", remedy="use noop or tagged")
