"""The prefill stage: prompts to their first token, then their pages to the decode stage.

Pages of a request: allocated by the scheduler, written by the prompt's steps, parked when the first token is chosen,
offered, read by the receiver, and free only when its answer has come or the transport is closed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from memopt.errors import PeerError, UnsupportedError, UsageError
from memopt.kernels.kv_formats import BF16
from memopt.runtime.engine.admission import pages_for
from memopt.runtime.engine.engine_core import EngineCore
from memopt.runtime.engine.events import TokenEvent
from memopt.runtime.engine.request import Request
from memopt.runtime.engine.sampling_params import SamplingParams
from memopt.runtime.stages.hand_over import HandOver, require_sendable
from memopt.runtime.stages.kv_geometry import geometry_of
from memopt.runtime.stages.model_identity import ModelIdentity
from memopt.runtime.stages.page_transport import Answer, PageSender

# offered: the first token is chosen, the decode stage is told. taken: it goes on there. refused, lost: it does not;
# lost when the transport ended without an answer, so that the request may run there or not. ended: nothing was left to
# decode, or the request failed here; `reason` is then the FinishReason.
PrefillState = Literal["offered", "taken", "refused", "lost", "ended"]


@dataclass(frozen=True, slots=True)
class PrefillEvent:
    """A change of a request's state. `token_id`: its first token, with "offered" and maybe with "ended"."""

    request_id: str
    state: PrefillState
    token_id: int | None = None
    reason: str = ""


@dataclass(slots=True)
class _Started:
    """A request of this stage. `number`: of its hand-over; `offered_seconds`: when that was, by time.monotonic."""

    request_id: str
    request: Request
    params: SamplingParams
    number: int = 0
    offered_seconds: float = 0.0


class PrefillStage:
    """Not thread-safe. One rank: a tensor-parallel stage would hand over rank by rank, which is not built."""

    def __init__(
        self,
        core: EngineCore,
        model: ModelIdentity,
        sender: PageSender,
        *,
        offer_seconds: float | None = None,
    ) -> None:
        """`core` has BF16 pools: UnsupportedError for others.

        `offer_seconds`: an offer without an answer is cancelled after that time, and when after as much again there is
        still none, the transport is closed. None: offers wait as long as the decode stage needs.
        """
        kv_format = core.pools.kv_format
        if kv_format is not BF16:
            raise UnsupportedError(
                f"the prefill stage's cache is {kv_format.name}, but pages are handed over in bf16",
                remedy='use kv_cache="bf16" for prefill; the decode stage converts to its own format',
            )
        self._core = core
        self._geometry = geometry_of(core.pools)
        self._model = model
        self._sender = sender
        self._offer_seconds = offer_seconds
        self._by_core_id: dict[int, _Started] = {}
        self._by_name: dict[str, _Started] = {}
        self._offered: dict[int, _Started] = {}
        self._last_number = 0
        self._is_closed = False

    @property
    def has_work(self) -> bool:
        """Whether a prompt is not computed, or an offer not answered."""
        return self._core.has_work or bool(self._offered)

    @property
    def num_offered(self) -> int:
        """Offers without an answer, whose pages are held."""
        return len(self._offered)

    def submit(self, request_id: str, prompt: Sequence[int], params: SamplingParams, *, tenant: str = "") -> None:
        """Queue a prompt. `request_id` is the caller's, unique among the requests that are not done with.

        Raises UsageError or CapacityError for a request that this stage cannot run, PeerError once the transport ended.
        """
        if self._is_closed:
            raise PeerError("the transport to the decode stage has ended", remedy="connect the stages again")
        if not request_id:
            raise UsageError("a request without a name", remedy="choose one")
        require_sendable(request_id, tenant, params, len(prompt))
        if request_id in self._by_name:
            raise UsageError(f"request {request_id!r} is running already", remedy="choose another name")
        first = replace(params, max_tokens=1)
        started = _Started(request_id, self._core.submit(prompt, first, tenant=tenant, holds_pages=True), params)
        self._by_core_id[started.request.request_id] = self._by_name[request_id] = started

    def abort(self, request_id: str) -> list[PrefillEvent]:
        """End a request: at once while it is computed here; once offered, its pages wait for the receiver's answer."""
        started = self._by_name.get(request_id)
        if started is None:
            return []
        if started.number:
            self._sender.cancel(started.number)
            return []
        event = self._core.abort(started.request.request_id)
        return [] if event is None else [self._after_step(event)]

    def step(self) -> list[PrefillEvent]:
        """One step of the engine, offers for what it finished, and what became of earlier offers."""
        events = [self._after_step(event) for event in self._core.step()]
        return events + self._hear()

    def close(self) -> list[PrefillEvent]:
        """End the transport and give back the pages of offers without an answer: nobody can read them any more."""
        self._is_closed = True
        self._sender.close()
        events: list[PrefillEvent] = []
        with suppress(PeerError):
            # An answer that came before the end is one.
            events += self._answered()
        for started in list(self._offered.values()):
            self._forget(started)
            events.append(PrefillEvent(started.request_id, "lost", reason="the transport ended without an answer"))
        return events

    def _after_step(self, event: TokenEvent) -> PrefillEvent:
        started = self._by_core_id[event.request_id]
        is_started = event.finish_reason == "length" and started.params.max_tokens > 1
        if not is_started or event.token_id is None:
            self._forget(started)
            return PrefillEvent(started.request_id, "ended", event.token_id, event.finish_reason or "")
        try:
            self._offer(started, event.token_id)
        except PeerError as problem:
            self._forget(started)
            return PrefillEvent(started.request_id, "lost", event.token_id, problem.message)
        return PrefillEvent(started.request_id, "offered", event.token_id)

    def _offer(self, started: _Started, first_token: int) -> None:
        request = started.request
        num_prompt_tokens = request.num_prompt_tokens
        hand_over = HandOver(
            number=self._last_number + 1,
            request_id=started.request_id,
            tenant=request.tenant,
            token_ids=tuple(request.tokens[:num_prompt_tokens]),
            first_token=first_token,
            params=started.params,
            model=self._model,
            geometry=self._geometry,
            pages=tuple(request.pages[: pages_for(num_prompt_tokens)]),
        )
        self._sender.offer(hand_over)
        self._last_number = started.number = hand_over.number
        started.offered_seconds = time.monotonic()
        self._offered[hand_over.number] = started

    def _answered(self) -> list[PrefillEvent]:
        """What has been answered. Raises PeerError once the transport has ended and all is told."""
        return [event for answer in self._sender.poll() for event in self._after_answer(answer)]

    def _hear(self) -> list[PrefillEvent]:
        try:
            events = self._answered()
        except PeerError:
            return [] if self._is_closed else self.close()
        if self._offer_seconds is not None:
            now = time.monotonic()
            waits = [(now - started.offered_seconds, number) for number, started in self._offered.items()]
            for number in (number for wait, number in waits if wait > self._offer_seconds):
                self._sender.cancel(number)
            if any(wait > 2 * self._offer_seconds for wait, _ in waits):
                return events + self.close()
        return events

    def _after_answer(self, answer: Answer) -> list[PrefillEvent]:
        started = self._offered.get(answer.number)
        if started is None:
            return []
        self._forget(started)
        state: PrefillState = "taken" if answer.is_taken else "refused"
        return [PrefillEvent(started.request_id, state, reason=answer.reason)]

    def _forget(self, started: _Started) -> None:
        """The one place where this stage gives pages back; a second call would find nothing to give."""
        self._core.release(started.request)
        del self._by_core_id[started.request.request_id]
        del self._by_name[started.request_id]
        self._offered.pop(started.number, None)
