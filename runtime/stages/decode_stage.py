"""The decode stage: takes started requests over, pages and all, and goes on from their first token.

A request is taken only when the pages of its longest answer are spoken for, so that no request is ever interrupted for
want of a page: what was computed with the prefill stage's weights cannot be computed again here. Until then it waits,
first come, first served, with its pages at the sender.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from memopt.errors import CapacityError, HandOverError, MemoptError, PeerError
from memopt.runtime.engine.admission import pages_for
from memopt.runtime.engine.engine_core import EngineCore
from memopt.runtime.engine.events import FinishReason, TextWatcher
from memopt.runtime.engine.request import Request
from memopt.runtime.engine.sampling_params import SamplingParams
from memopt.runtime.stages.hand_over import HandOver
from memopt.runtime.stages.kv_geometry import geometry_of
from memopt.runtime.stages.model_identity import ModelIdentity
from memopt.runtime.stages.page_transport import Offer, PageReceiver


@dataclass(frozen=True, slots=True)
class DecodeEvent:
    """As engine/events.py's TokenEvent, with the request's own name; the first token is among them."""

    request_id: str
    token_id: int | None
    text: str
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class _Running:
    """A request that was taken. `num_pages`: what its longest answer needs."""

    request_id: str
    request: Request
    num_pages: int


class DecodeStage:
    """Not thread-safe. One rank. The core is this stage's alone: nobody else submits to it."""

    def __init__(
        self,
        core: EngineCore,
        model: ModelIdentity,
        receiver: PageReceiver,
        *,
        new_text: Callable[[SamplingParams], TextWatcher] | None = None,
    ) -> None:
        """`core` has pools of any format but the reference one.

        `new_text`: for each request taken; without it events have no text, and requests with stop texts are refused.
        """
        self._core = core
        self._geometry = geometry_of(core.pools)
        self._model = model
        self._receiver = receiver
        self._new_text = new_text
        self._waiting: deque[HandOver] = deque()
        self._running: dict[int, _Running] = {}
        self._untold: list[DecodeEvent] = []
        self._is_sender_gone = False

    @property
    def has_work(self) -> bool:
        """Whether a request runs here, or waits to be taken."""
        return bool(self._running or self._waiting)

    @property
    def is_sender_gone(self) -> bool:
        """Whether the transport has ended: what runs goes on, nothing new comes."""
        return self._is_sender_gone

    @property
    def num_pages_promised(self) -> int:
        """Pages that the running requests hold or may still need."""
        return sum(running.num_pages for running in self._running.values())

    def step(self) -> list[DecodeEvent]:
        """Hear what is offered, take what there is room for, and compute one step.

        If it raises it can be tried again, which tells of what was done before.
        """
        self._hear()
        self._take_waiting()
        for event in self._core.step():
            request_id = self._running[event.request_id].request_id
            if event.finish_reason is not None:
                del self._running[event.request_id]
            self._untold.append(DecodeEvent(request_id, event.token_id, event.text, event.finish_reason))
        self._untold += self._end_interrupted()
        told, self._untold = self._untold, []
        return told

    def abort(self, request_id: str) -> list[DecodeEvent]:
        """End a request that runs or waits here; no events when there is none of that name."""
        for hand_over in self._waiting:
            if hand_over.request_id == request_id:
                self._waiting.remove(hand_over)
                self._receiver.refuse(hand_over.number, "aborted")
                return [DecodeEvent(request_id, None, "", "abort")]
        for running in self._running.values():
            if running.request_id == request_id:
                return [self._end(running, "abort")]
        return []

    def close(self) -> None:
        """End the transport; what was taken can still be stepped to its end."""
        self._receiver.close()
        self._lose_sender()

    def _hear(self) -> None:
        if self._is_sender_gone:
            return
        try:
            found = self._receiver.poll()
        except PeerError:
            self._lose_sender()
            return
        for item in found:
            if isinstance(item, Offer):
                self._consider(item.hand_over)
                continue
            for hand_over in [waiting for waiting in self._waiting if waiting.number == item.number]:
                self._waiting.remove(hand_over)
                self._receiver.refuse(item.number, "cancelled")

    def _lose_sender(self) -> None:
        # Their pages can no longer be read.
        self._is_sender_gone = True
        self._waiting.clear()

    def _consider(self, hand_over: HandOver) -> None:
        """Queue an offer, or refuse at once what can never be taken."""
        try:
            self._model.require_same(hand_over.model)
            self._geometry.require_same(hand_over.geometry)
            names = {running.request_id for running in self._running.values()}
            if hand_over.request_id in names or any(hand_over.request_id == one.request_id for one in self._waiting):
                raise HandOverError(f"request {hand_over.request_id!r:.80} is here already")
            if hand_over.params.stop and self._new_text is None:
                raise HandOverError("it has stop texts, and this stage makes no text", remedy="give it new_text")
            if hand_over.params.max_tokens < 2:
                raise HandOverError("max_tokens is 1, and the first token is there already")
            # The first token counts as one of the prompt's: it must be in the vocabulary as well.
            known = (*hand_over.token_ids, hand_over.first_token)
            rest = replace(hand_over.params, max_tokens=hand_over.params.max_tokens - 1)
            self._core.require_room(known, rest)
        except MemoptError as problem:
            self._receiver.refuse(hand_over.number, str(problem))
            return
        self._waiting.append(hand_over)

    def _take_waiting(self) -> None:
        while self._waiting:
            hand_over = self._waiting[0]
            num_pages = pages_for(hand_over.num_tokens + hand_over.params.max_tokens - 1)
            if self._running and self.num_pages_promised + num_pages > self._core.pages.num_usable:
                break
            taken = self._take(hand_over, num_pages)
            if taken is None:
                break
            self._untold += taken
            if self._waiting and self._waiting[0] is hand_over:
                self._waiting.popleft()

    def _take(self, hand_over: HandOver, num_pages: int) -> list[DecodeEvent] | None:
        """The first token's event; none when the hand-over failed; None when it must wait for room."""
        text = None if self._new_text is None else self._new_text(hand_over.params)
        piece, is_stopped = ("", False) if text is None else text.push(hand_over.first_token)
        if is_stopped:
            self._receiver.take(hand_over.number)
            return [DecodeEvent(hand_over.request_id, hand_over.first_token, piece, "stop")]
        tokens = [*hand_over.token_ids, hand_over.first_token]
        try:
            request = self._core.adopt(
                tokens, hand_over.num_tokens, hand_over.params, tenant=hand_over.tenant, text=text
            )
        except CapacityError as problem:
            # Pages were quarantined since the offer was considered.
            self._receiver.refuse(hand_over.number, str(problem))
            return []
        if request is None:
            return None
        pages = [held.page for held in request.pages[: len(hand_over.pages)]]
        try:
            self._receiver.fetch(hand_over, self._core.pools, pages)
        except PeerError:
            self._core.abort(request.request_id)
            self._lose_sender()
            return []
        except HandOverError as problem:
            self._core.abort(request.request_id)
            self._receiver.refuse(hand_over.number, str(problem))
            return []
        except BaseException:
            self._core.abort(request.request_id)
            raise
        self._receiver.take(hand_over.number)
        self._running[request.request_id] = _Running(hand_over.request_id, request, num_pages)
        return [DecodeEvent(hand_over.request_id, hand_over.first_token, piece, None)]

    def _end_interrupted(self) -> list[DecodeEvent]:
        """End what the engine interrupted after all, because pages were quarantined: its prompt's keys are lost."""
        interrupted = [running for running in self._running.values() if running.request.num_preemptions]
        return [self._end(running, "capacity") for running in interrupted]

    def _end(self, running: _Running, reason: FinishReason) -> DecodeEvent:
        event = self._core.abort(running.request.request_id)
        del self._running[running.request.request_id]
        return DecodeEvent(running.request_id, None, "" if event is None else event.text, reason)
