"""Whether the pages of an offer are still those that were offered."""

from __future__ import annotations

from collections.abc import Callable

from memopt.errors import HandOverError
from memopt.runtime.kv.layer_kv import DUMMY_PAGE
from memopt.runtime.stages.hand_over import HandOver


def require_offered_tags(hand_over: HandOver, tag_of: Callable[[int], int], num_pages: int, when: str) -> None:
    """HandOverError unless every page is one of the sender's `num_pages` and has the tag that it was offered with.

    `tag_of`: the tag that the sender's page has now; NO_TAG, as offered, where the sender does not tag pages. A tag
    changes before the first write of a page's next owner: if it is right after reading, what was read was right.
    """
    for index, held in enumerate(hand_over.pages):
        if not DUMMY_PAGE < held.page < num_pages:
            raise HandOverError(f"page {held.page} of hand-over {hand_over.number} is none of {num_pages}")
        found = tag_of(held.page)
        if found != held.tag:
            raise HandOverError(
                f"page {index} of hand-over {hand_over.number}, the sender's page {held.page}, was offered with tag "
                f"{held.tag:#x} and has {found:#x} {when} it was read: it was given to somebody else",
                remedy="the sender freed pages before the answer: stop it",
            )
