"""Both stages in one process: pages are read from the sender's pools into the receiver's."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from memopt.errors import PeerError
from memopt.runtime.integrity.tracker import PageTracker
from memopt.runtime.kv.layer_kv import KvPools
from memopt.runtime.stages.hand_over import HandOver
from memopt.runtime.stages.offered_pages import require_offered_tags
from memopt.runtime.stages.page_conversion import convert_pools
from memopt.runtime.stages.page_transport import Answer, Cancelled, Offer


@dataclass(slots=True)
class _Link:
    """What the two ends share."""

    inbox: deque[Offer | Cancelled] = field(default_factory=deque)
    answers: deque[Answer] = field(default_factory=deque)
    unanswered: set[int] = field(default_factory=set)
    is_closed: bool = False

    def require_open(self) -> None:
        if self.is_closed:
            raise PeerError("the other stage has closed the transport")


class LocalPageSender:
    """The sender's end (page_transport.PageSender)."""

    def __init__(self, link: _Link) -> None:
        self._link = link

    def offer(self, hand_over: HandOver) -> None:
        """See PageSender."""
        self._link.require_open()
        self._link.unanswered.add(hand_over.number)
        self._link.inbox.append(Offer(hand_over))

    def cancel(self, number: int) -> None:
        """See PageSender."""
        if number in self._link.unanswered:
            self._link.inbox.append(Cancelled(number))

    def poll(self) -> list[Answer]:
        """See PageSender."""
        answers = list(self._link.answers)
        self._link.answers.clear()
        if not answers:
            self._link.require_open()
        return answers

    def close(self) -> None:
        """See PageSender."""
        self._link.is_closed = True


class LocalPageReceiver:
    """The receiver's end (page_transport.PageReceiver)."""

    def __init__(self, link: _Link, pools: KvPools, tracker: PageTracker) -> None:
        self._link = link
        self._source = pools
        self._tracker = tracker

    def poll(self) -> list[Offer | Cancelled]:
        """See PageReceiver."""
        found = list(self._link.inbox)
        self._link.inbox.clear()
        if not found:
            self._link.require_open()
        return found

    def fetch(self, hand_over: HandOver, pools: KvPools, pages: list[int]) -> None:
        """See PageReceiver."""
        self._link.require_open()
        source = self._source
        require_offered_tags(hand_over, self._tracker.tag_of, source.num_pages, "before")
        convert_pools(source, [held.page for held in hand_over.pages], pools, pages, hand_over.num_tokens)
        require_offered_tags(hand_over, self._tracker.tag_of, source.num_pages, "after")

    def take(self, number: int) -> None:
        """See PageReceiver."""
        self._answer(Answer(number, is_taken=True))

    def refuse(self, number: int, reason: str) -> None:
        """See PageReceiver."""
        self._answer(Answer(number, is_taken=False, reason=reason))

    def close(self) -> None:
        """See PageReceiver."""
        self._link.is_closed = True

    def _answer(self, answer: Answer) -> None:
        if not self._link.is_closed and answer.number in self._link.unanswered:
            self._link.unanswered.remove(answer.number)
            self._link.answers.append(answer)


def local_transport(pools: KvPools, tracker: PageTracker) -> tuple[LocalPageSender, LocalPageReceiver]:
    """The two ends between the engine that has `pools` (BF16) and `tracker`, and another engine of this process."""
    link = _Link()
    return LocalPageSender(link), LocalPageReceiver(link, pools, tracker)
