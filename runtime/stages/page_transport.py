"""How pages come from the prefill stage to the decode stage: the two ends, whatever lies between them.

    sender                              receiver
    offer(hand_over)      ------->      poll() -> Offer         pages stay the sender's
                                        fetch(hand_over, ...)   read and converted into the receiver's pages
    poll() -> Answer      <-------      take(number)            only now may the sender free its pages
                          <-------      refuse(number, reason)
    cancel(number)        ------->      poll() -> Cancelled     answered all the same, by one of the two

Every offer gets one answer; a second one is ignored. When the transport is closed nothing can be read through it any
more, so that the pages of offers without an answer are free as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from memopt.runtime.kv.layer_kv import KvPools
from memopt.runtime.stages.hand_over import HandOver


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of an offer. `reason`: why it was refused, empty when it was taken."""

    number: int
    is_taken: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Offer:
    """A new hand-over, whose form was checked; whether it fits is not."""

    hand_over: HandOver


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The sender does not want this offer to be taken any more; it still waits for an answer."""

    number: int


class PageSender(Protocol):
    """The prefill stage's end. Used by one thread."""

    def offer(self, hand_over: HandOver) -> None:
        """Tell the receiver; `hand_over.pages` must stay as they are until the answer, or the end of the transport.

        Numbers rise. Raises PeerError when the transport is closed.
        """
        ...

    def cancel(self, number: int) -> None:
        """Ask for an early answer; nothing happens when there is one already."""
        ...

    def poll(self) -> list[Answer]:
        """Answers that have come, each offer's once. Raises PeerError when the transport is closed and all are told."""
        ...

    def close(self) -> None:
        """End the transport: when this returns nothing reads the sender's pages any more. May be called twice."""
        ...


class PageReceiver(Protocol):
    """The decode stage's end. Used by one thread."""

    def poll(self) -> list[Offer | Cancelled]:
        """What has come since the last call, in order.

        Raises PeerError when the transport is closed, by either end or because the sender broke its format, and all is
        told.
        """
        ...

    def fetch(self, hand_over: HandOver, pools: KvPools, pages: list[int]) -> None:
        """Read an offer's pages, convert them, and write them into `pages` of `pools`; waits until all are there.

        Raises PeerError when the transport ends before that, HandOverError when what arrives is not what was offered or
        the offer is cancelled meanwhile; what is then in `pages` must not be used.
        """
        ...

    def take(self, number: int) -> None:
        """The pages are ours: the sender may free its own. Nothing happens when the transport is closed."""
        ...

    def refuse(self, number: int, reason: str) -> None:
        """We do not take it, and will not read it any more. Nothing happens when the transport is closed."""
        ...

    def close(self) -> None:
        """End the transport. May be called twice."""
        ...
