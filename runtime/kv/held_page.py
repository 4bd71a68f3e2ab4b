"""A page as its holder knows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeldPage:
    """A physical page and the tag that it had when it was given out; NO_TAG under a tracker without tags.

    Every holder of a shared page has the same.
    """

    page: int
    tag: int
