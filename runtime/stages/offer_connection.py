"""The sender's half of a connection: offers go out and answers come in while the engine computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeAlias

from memopt.errors import HandOverError, MemoptError, PeerError
from memopt.runtime.stages.frame_connection import FrameConnection
from memopt.runtime.stages.frames import Frame, FrameKind, number_body, parse_number, parse_refusal
from memopt.runtime.stages.hand_over import HandOver, render_hand_over
from memopt.runtime.stages.page_transport import Answer

SendPages: TypeAlias = Callable[[HandOver, Callable[[], bool]], None]


class OfferConnection:
    """Two threads: one sends, one receives. `send_pages` sends the pages of an offer that the receiver pulls.

    It runs in the thread that sends and should stop once its second argument gives False: the offer then has an answer,
    or is cancelled. An error that it raises ends the connection. After `close` it does not run any more.
    """

    def __init__(self, connection: FrameConnection, send_pages: SendPages | None) -> None:
        self._connection = connection
        self._send_pages = send_pages
        self._lock = threading.Lock()
        self._unanswered: dict[int, HandOver] = {}
        self._cancelled: set[int] = set()
        self._last_number = 0
        self._outbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        self._failure: str | None = None
        self._threads = tuple(
            threading.Thread(target=self._guard, args=(loop,), name=f"memopt-{loop.__name__}", daemon=True)
            for loop in (self._send_frames, self._receive_frames)
        )
        for thread in self._threads:
            thread.start()

    def offer(self, hand_over: HandOver) -> None:
        """See PageSender."""
        raw = render_hand_over(hand_over)
        with self._lock:
            self._require_open()
            self._unanswered[hand_over.number] = hand_over
            self._last_number = hand_over.number
        self._outbox.put(lambda: self._connection.send(FrameKind.OFFER, raw))

    def cancel(self, number: int) -> None:
        """See PageSender."""
        with self._lock:
            if number not in self._unanswered or number in self._cancelled:
                return
            self._cancelled.add(number)
        self._outbox.put(lambda: self._connection.send(FrameKind.CANCEL, number_body(number)))

    def poll(self) -> list[Answer]:
        """See PageSender."""
        found: list[Answer] = []
        while True:
            try:
                found.append(self._answers.get_nowait())
            except Empty:
                break
        if not found:
            self._require_open()
        return found

    def close(self) -> None:
        """See PageSender."""
        self._fail("it was closed here")
        for thread in self._threads:
            thread.join()
        self._connection.close()

    def _guard(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Exception as problem:  # noqa: BLE001 - whatever ends a thread must end the connection, or nobody hears of it
            self._fail(problem.message if isinstance(problem, MemoptError) else f"{type(problem).__name__}: {problem}")

    def _send_frames(self) -> None:
        while (send := self._outbox.get()) is not None:
            send()

    def _receive_frames(self) -> None:
        while (frame := self._connection.receive()) is not None:
            if frame.kind is FrameKind.PULL and self._send_pages is not None:
                self._outbox.put(self._pull(parse_number(frame), self._send_pages))
            else:
                self._take_answer(_answer_of(frame))

    def _pull(self, number: int, send_pages: SendPages) -> Callable[[], None]:
        self._require_offered(number)

        def wanted() -> HandOver | None:
            with self._lock:
                return None if number in self._cancelled else self._unanswered.get(number)

        def send() -> None:
            hand_over = wanted()
            if hand_over is not None:
                send_pages(hand_over, lambda: wanted() is not None)

        return send

    def _take_answer(self, answer: Answer) -> None:
        self._require_offered(answer.number)
        with self._lock:
            # The first answer counts: after it the pages may be somebody else's.
            if self._unanswered.pop(answer.number, None) is not None:
                self._cancelled.discard(answer.number)
                self._answers.put(answer)

    def _require_offered(self, number: int) -> None:
        if not 0 < number <= self._last_number:
            raise HandOverError(f"the receiver speaks of hand-over {number}, but the last one was {self._last_number}")

    def _require_open(self) -> None:
        if self._failure is not None:
            raise PeerError(f"the transport to the decode stage has ended: {self._failure}", remedy="connect it again")

    def _fail(self, reason: str) -> None:
        with self._lock:
            if self._failure is None:
                self._failure = reason
        self._connection.shut_down()
        self._outbox.put(None)


def _answer_of(frame: Frame) -> Answer:
    if frame.kind is FrameKind.TAKEN:
        return Answer(parse_number(frame), is_taken=True)
    if frame.kind is FrameKind.REFUSED:
        number, reason = parse_refusal(frame)
        return Answer(number, is_taken=False, reason=reason)
    raise HandOverError(f"the receiver sent a {frame.kind.name} frame, which only the sender may send")
