"""Faults in the pages of an EngineCore's requests, and runs that record what each request's logits were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from page_faults import force_free, give_out_last
from torch import Tensor

from memopt.errors import PageError
from memopt.kernels.layout import NO_TAG
from memopt.runtime.engine.engine_core import EngineCore
from memopt.runtime.engine.model_runner import Model
from memopt.runtime.engine.request import Request
from memopt.runtime.engine.step_plan import StepPlan
from memopt.runtime.integrity.tagged_tracker import TaggedTracker
from memopt.runtime.kv.layer_kv import DUMMY_PAGE, KvPools
from memopt.runtime.model.step_rows import StepRows


def work_as_on_a_gpu(core: EngineCore) -> None:
    """The tables and tags of a new core are written by torch alone, and the host never knows what a check found."""
    tracker, tables = core.pages.tracker, core.pages.tables
    assert isinstance(tracker, TaggedTracker)
    tracker._host_tags = None
    tables._is_on_cpu = False
    tables._targets = (tables.pages, tables.expected, tables.num_pages)


def row_of(request: Request) -> int:
    """The request's row of the block table."""
    assert request.table_row is not None
    return request.table_row


def reallocate(core: EngineCore, request: Request) -> None:
    """A live request's page is freed behind its back: the next request that needs a page takes it."""
    assert force_free(core.pages.manager, request.pages[0].page)


def evict_shared(core: EngineCore, request: Request) -> None:
    """A page that requests and the prefix index hold is given away."""
    assert core.pages.manager.num_holders(request.pages[0].page) >= 3
    reallocate(core, request)


def double_free(core: EngineCore, request: Request) -> None:
    """A page is freed while its request goes on to hold it: the request's own release is then the second one."""
    held = request.pages[1]
    core.pages.manager.release([held], core.num_steps)
    with pytest.raises(PageError, match=f"page {held.page} cannot be freed"):
        core.pages.manager.release([held], core.num_steps)


def swap_own_entries(core: EngineCore, request: Request) -> None:
    """Two entries of the request's table change places."""
    row = core.pages.tables.pages[row_of(request)]
    row[[0, 1]] = row[[1, 0]]


def swap_entries(core: EngineCore, one: Request, two: Request) -> None:
    """Entries of two requests change places."""
    pages = core.pages.tables.pages
    first = pages[row_of(one), 0].clone()
    pages[row_of(one), 0] = pages[row_of(two), 0]
    pages[row_of(two), 0] = first


def stale_entry(core: EngineCore, request: Request, other: Request) -> None:
    """The table leads to another request's page."""
    core.pages.tables.pages[row_of(request), 0] = other.pages[0].page


def entry_outside_the_pool(core: EngineCore, request: Request) -> None:
    """The table leads nowhere."""
    core.pages.tables.pages[row_of(request), 1] = 2**31 - 1


def lost_entry(core: EngineCore, request: Request) -> None:
    """The newest page never came to the table, nor its tag."""
    last = len(request.pages) - 1
    core.pages.tables.pages[row_of(request), last] = DUMMY_PAGE
    core.pages.tables.expected[row_of(request), last] = NO_TAG


def stale_record(core: EngineCore, request: Request) -> None:
    """The expected tag is an older one; the page is right."""
    core.pages.tables.expected[row_of(request), 0] -= 1


def padding_row(core: EngineCore) -> None:
    """Rubbish in a row that no request has."""
    used = {request.table_row for request in core.scheduler.running}
    free = next(row for row in range(core.limits.max_requests) if row not in used)
    core.pages.tables.pages[free] = 2**31 - 1
    core.pages.tables.expected[free] = 7


def free_only(core: EngineCore, request: Request) -> None:
    """A page is free while its request reads it, and nobody takes it: what it reads is right."""
    manager = core.pages.manager
    # The index holds the first one too.
    page = request.pages[1].page
    assert manager.num_holders(page) == 1
    assert force_free(manager, page)
    give_out_last(manager, page)


class RecordingModel:
    """Another model, and the logits that it gave last."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.last_logits: Tensor | None = None

    def forward(self, rows: StepRows, pools: KvPools) -> Tensor:
        return self._model.forward(rows, pools)

    def logits(self, hidden: Tensor) -> Tensor:
        self.last_logits = self._model.logits(hidden)
        return self.last_logits


@dataclass(slots=True)
class RecordedRun:
    """By a request's name: what it generated, the bytes of the logits of each step, and how it ended."""

    requests: dict[str, Request] = field(default_factory=dict)
    logits: dict[str, list[bytes]] = field(default_factory=dict)

    def tokens(self, name: str) -> list[int]:
        """Generated tokens."""
        request = self.requests[name]
        return request.tokens[request.num_prompt_tokens :]

    def reasons(self) -> Mapping[str, str | None]:
        """How each request ended; None for one that did not."""
        return {name: request.finish_reason for name, request in self.requests.items()}


def record(core: EngineCore, model: RecordingModel, run: RecordedRun, num_steps: int) -> None:
    """Up to `num_steps` steps."""
    sampled: list[Request] = []
    schedule = type(core.scheduler).schedule

    def scheduled() -> StepPlan:
        plan = schedule(core.scheduler)
        sampled[:] = [item.request for item in plan.scheduled for _ in range(item.num_samples)]
        return plan

    core.scheduler.schedule = scheduled  # type: ignore[method-assign]
    names = {request.request_id: name for name, request in run.requests.items()}
    for _ in range(num_steps):
        if not core.has_work:
            return
        core.step()
        if sampled:
            assert model.last_logits is not None
            for request, row in zip(sampled, model.last_logits, strict=True):
                run.logits.setdefault(names[request.request_id], []).append(row.numpy().tobytes())
