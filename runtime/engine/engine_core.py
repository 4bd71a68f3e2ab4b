"""Requests in, tokens out: the loop around a model that is in memory. It knows no release and no text.

A step, in order; everything between "tables" and "copy" is queued on the device without a wait:

    schedule    who computes what; pages are held, older requests may take those of newer ones
    tables      the requests' page ids and expected tags, as attention will read them
    check       one comparison of tags; under tensor parallelism the largest flag of all ranks counts
    mask        flagged requests read the dummy page and write nowhere
    forward     keys are stored, then read through the pages by every row
    sample      float32 logits of each request's last rows
    copy        tokens and flags to the host: the step is over, what it used may be given away
    apply       flagged requests end alone: token discarded, page quarantined; the others get their tokens
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from memopt.errors import UsageError
from memopt.runtime.engine.admission import EngineLimits, require_room
from memopt.runtime.engine.events import FinishReason, TextWatcher, TokenEvent
from memopt.runtime.engine.metrics import EngineMetrics, IntegrityMetrics
from memopt.runtime.engine.metrics_recorder import MetricsRecorder
from memopt.runtime.engine.model_runner import Drafter, Model, ModelRunner, RequestResult
from memopt.runtime.engine.request import Request, RequestState
from memopt.runtime.engine.request_pages import RequestPages
from memopt.runtime.engine.sampling_params import SamplingParams
from memopt.runtime.engine.scheduler import Scheduler
from memopt.runtime.engine.step_plan import ScheduledRows, StepPlan
from memopt.runtime.integrity.tracker import NoopTracker, PageTracker
from memopt.runtime.kv.layer_kv import KvPools
from memopt.runtime.parallel.communicator import Communicator, SingleRank


class EngineCore:
    """Not thread-safe: one thread submits, steps and aborts. Under tensor parallelism every rank does the same."""

    def __init__(
        self,
        model: Model,
        pools: KvPools,
        limits: EngineLimits,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        tracker: PageTracker | None = None,
        communicator: Communicator | None = None,
        prefix_namespace: bytes | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """`prefix_namespace` turns the prefix cache on; it names all that the keys in a page depend on."""
        self.limits = limits
        self.pools = pools
        self.pages = RequestPages(pools, limits, tracker or NoopTracker(), prefix_namespace)
        self.scheduler = Scheduler(limits, self.pages)
        self._runner = ModelRunner(
            model, pools, self.pages.tables, self.pages.tracker, communicator or SingleRank(), drafter
        )
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._size_bytes = pools.size_bytes
        self._recorder = MetricsRecorder()
        self._requests: dict[int, Request] = {}
        self._num_submitted = 0
        self.num_steps = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return self.scheduler.has_work

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        tenant: str = "",
        text: TextWatcher | None = None,
        holds_pages: bool = False,
    ) -> Request:
        """Queue a request. UsageError or CapacityError, at once, for one that this engine could never finish.

        `tenant` parts the prefix cache. `holds_pages`: they stay after an end with tokens until `release`.
        """
        self.require_room(prompt, params)
        return self.enqueue(prompt, params, tenant=tenant, text=text, holds_pages=holds_pages)

    def enqueue(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        tenant: str = "",
        text: TextWatcher | None = None,
        holds_pages: bool = False,
    ) -> Request:
        """As `submit`, of a request that `require_room` let pass before; should it no longer fit, it ends by itself."""
        request = self._new_request(prompt, len(prompt), params, tenant, text)
        request.holds_pages = holds_pages
        self.scheduler.add(request)
        self._recorder.record_submission()
        return request

    def adopt(
        self,
        tokens: Sequence[int],
        num_prompt_tokens: int,
        params: SamplingParams,
        *,
        tenant: str = "",
        text: TextWatcher | None = None,
    ) -> Request | None:
        """Run a request whose prompt was computed elsewhere; None when there is no room for it now.

        `tokens`: the prompt and what was generated, of which only the last one's keys are still to be computed. The
        caller fills the `pages` of the request that it gets before the next step. Errors as for `submit`.
        """
        if not 0 < num_prompt_tokens < len(tokens):
            raise UsageError(
                f"{len(tokens)} tokens, {num_prompt_tokens} of them the prompt's, are not a started request"
            )
        self.require_room(tokens[:num_prompt_tokens], params)
        request = self._new_request(tokens, num_prompt_tokens, params, tenant, text)
        if not self.scheduler.adopt(request):
            del self._requests[request.request_id]
            return None
        self._recorder.record_submission()
        return request

    def require_room(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """What `submit` checks, and nothing else."""
        require_room(prompt, params, self.limits, self._vocab_size, self.pages.num_usable)

    def step(self) -> list[TokenEvent]:
        """Compute one step and tell what came of it; nothing when there is nothing to do.

        If it raises, no request has changed and the step can be tried again.
        """
        started_seconds = time.monotonic()
        plan = self.scheduler.schedule()
        self._recorder.record_preemptions(len(plan.preempted))
        results: Sequence[RequestResult] = ()
        if plan.scheduled:
            self.num_steps += 1
            self.pages.launch(self.num_steps)
            self._record_starts(plan, started_seconds)
            try:
                results = self._runner.run(plan)
            finally:
                # A step that failed is over too: what it queued on the device stands before all that comes.
                self.pages.retire(self.num_steps)
        events = [self._finish(request, "capacity") for request in plan.lost]
        if plan.scheduled:
            events += self._apply(plan, results)
            num_prompt_rows = sum(item.num_prefill_rows for item in plan.scheduled)
            self._recorder.record_step(time.monotonic() - started_seconds, num_prompt_rows)
        return events

    def abort(self, request_id: int) -> TokenEvent | None:
        """End a request now, whatever its state; None when it has ended already, or was never submitted."""
        request = self._requests.get(request_id)
        return None if request is None else self._finish(request, "abort")

    def release(self, request: Request) -> None:
        """Give back the pages that a finished request held for a hand-over; once, a second call does nothing."""
        if request.state is not RequestState.FINISHED:
            raise UsageError(f"request {request.request_id} still runs", remedy="abort it, or wait until it ends")
        if request.pages:
            self.pages.drop(request)

    def metrics(self) -> EngineMetrics:
        """What was counted since the core was made, and what it holds now."""
        manager, counts, scheduler = self.pages.manager, self.pages.counts, self.scheduler
        return self._recorder.metrics(
            num_pages=manager.num_pages,
            num_used_pages=manager.num_used,
            peak_used_pages=manager.peak_used,
            num_quarantined_pages=manager.num_quarantined,
            num_tokens=sum(request.num_computed for request in scheduler.running),
            size_bytes=self._size_bytes,
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            integrity=IntegrityMetrics(counts.num_checks, counts.num_mismatches, counts.num_lost_pages),
            reuse=self.pages.reuse,
        )

    def _new_request(
        self,
        tokens: Sequence[int],
        num_prompt_tokens: int,
        params: SamplingParams,
        tenant: str,
        text: TextWatcher | None,
    ) -> Request:
        request = Request(self._num_submitted, list(tokens), num_prompt_tokens, params, tenant, text)
        request.submitted_seconds = time.monotonic()
        self._num_submitted += 1
        self._requests[request.request_id] = request
        return request

    def _record_starts(self, plan: StepPlan, now_seconds: float) -> None:
        for item in plan.scheduled:
            if not item.request.has_started:
                item.request.has_started = True
                self._recorder.record_start(now_seconds - item.request.submitted_seconds)

    def _apply(self, plan: StepPlan, results: Sequence[RequestResult]) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        for item, found in zip(plan.scheduled, results, strict=True):
            if found.first_mismatch is not None:
                self.pages.report_mismatch(item.request, found.first_mismatch, self.num_steps)
                events.append(self._finish(item.request, "page_mismatch"))
            else:
                events += self._advance(item, found)
        return events

    def _advance(self, item: ScheduledRows, found: RequestResult) -> list[TokenEvent]:
        """Take a clean step's tokens: the first always, each further one as long as the draft before it was right.

        Logits that are not finite end the request when their token's turn comes: behind a wrong draft it never does.
        """
        request = item.request
        if found.token_ids and not found.num_finite:
            return [self._finish(request, "nonfinite")]
        request.num_computed = item.first_position + item.num_rows
        if item.num_prefill_rows and request.num_computed >= request.num_prompt_tokens:
            self.pages.remember_prompt(request)
        drafts, request.drafts = request.drafts, ()
        events: list[TokenEvent] = []
        for number, token in enumerate(found.token_ids):
            if number > 0 and drafts[number - 1] != request.tokens[-1]:
                break
            if number >= found.num_finite:
                events.append(self._finish(request, "nonfinite"))
                break
            events.append(self._take(request, token))
            if events[-1].finish_reason is not None:
                break
            request.drafts = found.draft_ids[number : number + 1]
        if events and request.state is RequestState.RUNNING:
            # Keys of drafts that were wrong are overwritten when their positions are computed again.
            request.num_computed = len(request.tokens) - 1
        if drafts:
            self._recorder.record_drafts(len(drafts), len(events) - 1)
        return events

    def _take(self, request: Request, token: int) -> TokenEvent:
        now_seconds = time.monotonic()
        last_seconds = request.last_token_seconds
        is_first = last_seconds is None
        self._recorder.record_token(now_seconds - (last_seconds or request.submitted_seconds), is_first=is_first)
        request.last_token_seconds = now_seconds
        request.tokens.append(token)
        if token in self._eos_token_ids and not request.params.ignore_eos:
            return self._finish(request, "stop", token)
        text, is_stopped = ("", False) if request.text is None else request.text.push(token)
        if is_stopped:
            return self._finish(request, "stop", token, text, is_text_complete=True)
        if request.num_tokens_left <= 0:
            return self._finish(request, "length", token, text)
        return TokenEvent(request.request_id, token, text, None)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        token: int | None = None,
        text: str = "",
        *,
        is_text_complete: bool = False,
    ) -> TokenEvent:
        if request.text is not None and not is_text_complete:
            text += request.text.flush()
        self.scheduler.remove(request, is_suspect=reason in ("page_mismatch", "nonfinite"))
        if request.is_doubtful and reason in ("stop", "length"):
            reason = "page_mismatch"
        request.finish_reason = reason
        del self._requests[request.request_id]
        self._recorder.record_end(reason)
        return TokenEvent(request.request_id, token, text, reason)
