"""Decides what each step computes: continuous batching, chunked prefill, preemption by recompute.

Decoding requests go first, each its one row (and drafts); the rows that are left go to prompts, and to tokens that are
computed again, oldest request first. New requests start in the order in which they came: nobody overtakes, so nobody
starves. Decoding cannot be starved by prompts since it goes first, nor prompts by decoding since a step has more rows
than all decoding requests together can fill.
"""

from __future__ import annotations

from collections import deque

from memopt.runtime.engine.admission import EngineLimits
from memopt.runtime.engine.request import Request, RequestState
from memopt.runtime.engine.request_pages import RequestPages
from memopt.runtime.engine.step_plan import ScheduledRows, StepPlan


class Scheduler:
    """Requests that wait and requests that run, the latter in the order of admission.

    A request gets pages for all of its known tokens when it starts, one more each time that it outgrows them, and gives
    them all up when it ends or when an older request needs a page and none is free: the newest goes first, and waits at
    the head of the queue. The oldest is thus never interrupted, and since one request alone always fits, every request
    ends.
    """

    def __init__(self, limits: EngineLimits, pages: RequestPages) -> None:
        self._limits = limits
        self._pages = pages
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a new request; it was admitted by `admission.require_room`."""
        self.waiting.append(request)

    def schedule(self) -> StepPlan:
        """The next step. Pages are held when this returns; rows, not yet computed, are no state of the requests."""
        scheduled: list[ScheduledRows] = []
        preempted: list[Request] = []
        lost: list[Request] = []
        self._schedule_decoding(scheduled, preempted, lost)
        num_rows_left = self._limits.max_step_tokens - sum(rows.num_rows for rows in scheduled)
        num_rows_left = self._schedule_missing(scheduled, num_rows_left)
        if not preempted:
            self._start_waiting(scheduled, lost, num_rows_left)
        return StepPlan(tuple(scheduled), tuple(preempted), tuple(lost))

    def remove(self, request: Request, *, is_suspect: bool = False) -> None:
        """Forget a request that ends, whatever its state, and give its pages back.

        `is_suspect`: what is in its pages is not to be trusted. Pages of a request that has generated tokens and
        `holds_pages` stay with it.
        """
        if request.state is RequestState.WAITING:
            self.waiting.remove(request)
        elif request.state is RequestState.RUNNING:
            self.running.remove(request)
            if is_suspect:
                self._pages.drop_suspect(request)
            elif request.holds_pages and request.num_generated:
                self._pages.park(request)
            else:
                self._pages.drop(request)
        request.state = RequestState.FINISHED

    def adopt(self, request: Request) -> bool:
        """Run a request at once whose pages somebody else fills; False when there is no room for it now.

        Nor is there while others wait: their pages were given to older requests, and come first when some are free.
        """
        if self.waiting or len(self.running) >= self._limits.max_requests:
            return False
        if not self._pages.start(request, self._watermark(), can_reuse=False):
            return False
        request.num_computed = len(request.tokens) - 1
        self._run(request)
        return True

    def _schedule_decoding(self, scheduled: list[ScheduledRows], preempted: list[Request], lost: list[Request]) -> None:
        # A copy: the newest leave the list while it is walked.
        for request in list(self.running):
            if request.state is RequestState.RUNNING and request.is_decoding:
                self._fit_drafts(request)
                if self._find_pages(request, preempted, lost):
                    num_rows = 1 + len(request.drafts)
                    scheduled.append(ScheduledRows(request, request.num_computed, num_rows))

    def _fit_drafts(self, request: Request) -> None:
        """Drop drafts that the request may not use, or that need a page of their own when none is free."""
        num_useful = min(len(request.drafts), request.num_tokens_left - 1)
        request.drafts = request.drafts[: max(num_useful, 0)]
        if request.drafts and not self._pages.grow(request, len(request.tokens) + len(request.drafts)):
            request.drafts = ()

    def _find_pages(self, request: Request, preempted: list[Request], lost: list[Request]) -> bool:
        """Hold the page of the newest token, if need be a newer request's; False when `request` itself must wait."""
        while not self._pages.grow(request, len(request.tokens) + len(request.drafts)):
            victim = self.running[-1]
            if victim is request and len(self.running) == 1:
                # Alone, and still without a page: others hold some for a hand-over, or too many are quarantined.
                if not self._pages.could_hold(len(request.tokens)):
                    lost.append(request)
                return False
            self._preempt(victim)
            preempted.append(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._pages.drop(request)
        request.state = RequestState.WAITING
        request.num_computed = 0
        request.drafts = ()
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def _schedule_missing(self, scheduled: list[ScheduledRows], num_rows_left: int) -> int:
        for request in self.running:
            if num_rows_left > 0 and not request.is_decoding:
                num_rows_left -= self._schedule_chunk(request, scheduled, num_rows_left)
        return num_rows_left

    def _schedule_chunk(self, request: Request, scheduled: list[ScheduledRows], num_rows_left: int) -> int:
        num_rows = min(request.num_missing, num_rows_left)
        scheduled.append(ScheduledRows(request, request.num_computed, num_rows))
        return num_rows

    def _start_waiting(self, scheduled: list[ScheduledRows], lost: list[Request], num_rows_left: int) -> None:
        while self.waiting and num_rows_left > 0 and len(self.running) < self._limits.max_requests:
            request = self.waiting[0]
            if not self._pages.start(request, self._watermark()):
                if not self._pages.could_hold(len(request.tokens)):
                    lost.append(request)
                return
            self.waiting.popleft()
            self._run(request)
            num_rows_left -= self._schedule_chunk(request, scheduled, num_rows_left)

    def _run(self, request: Request) -> None:
        request.state = RequestState.RUNNING
        self.running.append(request)

    def _watermark(self) -> int:
        """Free pages that a start must leave: one for each running request, which will need it within 64 tokens."""
        return len(self.running)
