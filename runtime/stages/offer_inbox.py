"""The receiver's half of a connection: offers as they come, and one answer to each."""

from __future__ import annotations

from collections import deque
from typing import NoReturn

from memopt.errors import HandOverError, PeerError
from memopt.runtime.stages.frame_connection import FrameConnection
from memopt.runtime.stages.frames import Frame, FrameKind, number_body, parse_number, refusal_body
from memopt.runtime.stages.hand_over import HandOver, parse_hand_over
from memopt.runtime.stages.page_transport import Cancelled, Offer

# Frames that one `poll` reads: the engine has steps to compute meanwhile.
_MAX_FRAMES_AT_ONCE = 64


class OfferInbox:
    """Used by one thread, the engine's."""

    def __init__(self, connection: FrameConnection) -> None:
        self._connection = connection
        self._found: deque[Offer | Cancelled] = deque()
        self._unanswered: set[int] = set()
        self._last_number = 0

    def poll(self) -> list[Offer | Cancelled]:
        """See PageReceiver."""
        try:
            for _ in range(_MAX_FRAMES_AT_ONCE):
                frame = self._connection.receive(0)
                if frame is None:
                    break
                self._take(frame)
        except HandOverError as problem:
            if not self._found:
                raise PeerError(f"the prefill stage was cut off: {problem}", remedy="connect it again") from problem
        except PeerError:
            if not self._found:
                raise
        found = list(self._found)
        self._found.clear()
        return found

    def pull_pages(self, number: int) -> None:
        """Ask for the pages of an offer."""
        self._connection.send(FrameKind.PULL, number_body(number))

    def next_pages(self, number: int, wait_seconds: float) -> Frame:
        """The next PAGES frame, whatever else comes before it.

        Raises HandOverError when the offer is cancelled meanwhile or none comes within `wait_seconds`, else as
        `FrameConnection.receive`.
        """
        while (frame := self._connection.receive(wait_seconds)) is not None:
            if frame.kind is FrameKind.PAGES:
                return frame
            self._take(frame)
            if Cancelled(number) in self._found:
                raise HandOverError(f"hand-over {number} was cancelled while its pages were read")
        raise HandOverError(
            f"no page of hand-over {number} came within {wait_seconds:g} s", remedy="look at the sender"
        )

    def is_alive(self) -> bool:
        """Whether the sender had not closed the connection by now."""
        return self._connection.is_alive()

    def break_off(self, reason: str) -> NoReturn:
        """End the connection with a sender that breaks the format. Raises HandOverError."""
        self._connection.shut_down()
        raise HandOverError(reason, remedy="both stages must run the same memopt")

    def take(self, number: int) -> None:
        """See PageReceiver."""
        self._answer(number, FrameKind.TAKEN, number_body(number))

    def refuse(self, number: int, reason: str) -> None:
        """See PageReceiver."""
        self._answer(number, FrameKind.REFUSED, refusal_body(number, reason))

    def close(self) -> None:
        """See PageReceiver."""
        self._connection.close()

    def _answer(self, number: int, kind: FrameKind, body: bytes) -> None:
        if number in self._unanswered:
            self._unanswered.remove(number)
            try:
                self._connection.send(kind, body)
            except PeerError:
                # The sender is gone, and with the connection its pages are free; the next poll tells.
                return

    def _take(self, frame: Frame) -> None:
        if frame.kind is FrameKind.OFFER:
            hand_over = self._parse(frame)
            self._last_number = hand_over.number
            self._unanswered.add(hand_over.number)
            self._found.append(Offer(hand_over))
        elif frame.kind is FrameKind.CANCEL:
            number = parse_number(frame)
            if number in self._unanswered:
                self._found.append(Cancelled(number))
        elif frame.kind is not FrameKind.PAGES:
            self.break_off(f"the sender sent a {frame.kind.name} frame at the wrong time")
        # Pages that nobody waits for belong to an offer that was cancelled while they were under way.

    def _parse(self, frame: Frame) -> HandOver:
        try:
            hand_over = parse_hand_over(bytes(frame.body))
        except HandOverError as problem:
            self.break_off(problem.message)
        if hand_over.number <= self._last_number:
            self.break_off(f"hand-over {hand_over.number} comes after {self._last_number}, but numbers rise")
        return hand_over
