"""The pages of requests: joins the page manager, the tables on the device, the tags and the prefix index.

    start --> grow ... --> drop           every page back once; free when the steps that may read it have finished
                       |-> park --> drop  the table's row goes at once, the pages when they were handed over
                       `-> drop_suspect   after a fault: what is still the request's goes back, and out of the index

Pages that a request shares through the prefix index are full and lie before its first missing token: it never writes
to them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memopt.kernels.kv_cache.page_tags_reference import NO_MISMATCH
from memopt.kernels.layout import PAGE_TOKENS
from memopt.runtime.engine.admission import EngineLimits, pages_for
from memopt.runtime.engine.metrics import ReuseMetrics
from memopt.runtime.engine.request import Request
from memopt.runtime.integrity.mismatch import (
    PREFIX_INDEX,
    IntegrityCounts,
    PageMismatch,
    describe_mismatch,
    log_mismatch,
)
from memopt.runtime.integrity.tracker import PageTracker
from memopt.runtime.kv.block_tables import BlockTables
from memopt.runtime.kv.held_page import HeldPage
from memopt.runtime.kv.layer_kv import KvPools, MlaLayerKv
from memopt.runtime.kv.page_manager import PageManager
from memopt.runtime.kv.prefix_index import PrefixIndex


class RequestPages:
    """All pages of one engine. `tables`, `manager`, `tracker` and `prefix_index` (None when off) may be looked at."""

    def __init__(
        self, pools: KvPools, limits: EngineLimits, tracker: PageTracker, prefix_namespace: bytes | None = None
    ) -> None:
        self.tracker = tracker
        self.manager = PageManager(pools.num_pages, tracker)
        self.tables = BlockTables(limits.max_requests, limits.max_pages, device_of(pools))
        self.prefix_index = PrefixIndex(prefix_namespace, self.manager) if prefix_namespace is not None else None
        self.counts = IntegrityCounts()
        self._num_lookups = self._num_looked_up_tokens = self._num_hit_tokens = 0
        self._launched_step = 0
        self._holders: dict[int, Request] = {}

    @property
    def num_usable(self) -> int:
        """Pages that one request could have if it were alone."""
        return self.manager.num_pages - self.manager.num_quarantined

    @property
    def reuse(self) -> ReuseMetrics:
        """What the prefix index was asked by requests that started; one that must wait asks again, uncounted."""
        return ReuseMetrics(self._num_lookups, self._num_looked_up_tokens, self._num_hit_tokens)

    def could_hold(self, num_tokens: int) -> bool:
        """Whether one request of that many tokens would fit if it were alone."""
        return pages_for(num_tokens) <= self.num_usable

    def start(self, request: Request, num_spare: int, *, can_reuse: bool = True) -> bool:
        """Pages for all known tokens, the first ones from the prefix index; False, and nothing changed, without room.

        `num_spare`: free pages that must be left. `request.num_computed` is then the number of reused tokens.
        """
        reused = []
        if self.prefix_index is not None and can_reuse:
            prompt = request.tokens[: request.num_prompt_tokens]
            reused = self.prefix_index.match(prompt, _salt(request))
            self._drop_lost_entries(self.prefix_index)
        num_needed = pages_for(len(request.tokens)) - len(reused)
        new_pages = self.manager.allocate(num_needed) if self._make_free(num_needed + num_spare) else None
        if new_pages is None:
            self.manager.release(reused, self._launched_step)
            return False
        request.pages = [*reused, *new_pages]
        request.table_row = self.tables.add_row()
        self.tables.extend(request.table_row, request.pages)
        request.num_reused_tokens = request.num_computed = len(reused) * PAGE_TOKENS
        self._holders[request.request_id] = request
        if self.prefix_index is not None and can_reuse:
            self._num_lookups += 1
            self._num_looked_up_tokens += request.num_prompt_tokens
            self._num_hit_tokens += request.num_computed
        return True

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Pages for `num_tokens` tokens; False, and nothing changed, when too few are free."""
        num_needed = pages_for(num_tokens) - len(request.pages)
        if num_needed <= 0:
            return True
        new_pages = self.manager.allocate(num_needed) if self._make_free(num_needed) else None
        if request.table_row is None or new_pages is None:
            return False
        request.pages += new_pages
        self.tables.extend(request.table_row, new_pages)
        return True

    def drop(self, request: Request) -> None:
        """Give back every page, and the row.

        A page that the request does not hold any more was freed behind its back: a fault, but this request's alone. The
        page is quarantined, logged and counted, and the request's pages leave the index. If nobody compares tags, what
        it read may have been another's: `request.is_doubtful` is then set.
        """
        pages = self._forget(request)
        lost = self.manager.release_own(pages, self._launched_step)
        if lost:
            self._forget_in_index(pages)
            request.is_doubtful |= not self.tracker.is_checking
        for place in lost:
            self._report_lost(str(request.request_id), place, pages[place])

    def park(self, request: Request) -> None:
        """Give back the row of the tables, and keep the pages for a hand-over."""
        self._drop_row(request)

    def drop_suspect(self, request: Request) -> None:
        """As `drop` after a fault: pages that are not the request's any more are left alone."""
        pages = self._forget(request)
        self._forget_in_index(pages)
        self.manager.release_own(pages, self._launched_step)

    def remember_prompt(self, request: Request) -> None:
        """Keep the prompt's full pages for later requests; all of them were computed in steps that ended clean.

        Never those of generated tokens: their keys were computed in another form than a prompt's (model/step_rows.py).
        """
        if self.prefix_index is not None:
            prompt = request.tokens[: request.num_prompt_tokens]
            self.prefix_index.insert(prompt, request.pages, _salt(request))

    def report_mismatch(self, request: Request, first_mismatch: int, step: int) -> PageMismatch:
        """Log and count a request that the tag check flagged, and quarantine the page. Before its pages are dropped.

        It is the page that the request holds there, which is the same on all ranks; the report names the page that
        its table led to.
        """
        row = request.table_row if request.table_row is not None else NO_MISMATCH
        mismatch = describe_mismatch(self.tables, self.tracker, row, first_mismatch, str(request.request_id), step)
        log_mismatch(mismatch)
        self.counts.num_mismatches += 1
        if 0 <= first_mismatch < len(request.pages):
            self.manager.quarantine(request.pages[first_mismatch].page)
        return mismatch

    def launch(self, step: int) -> None:
        """A step starts that may read any page that is held now."""
        self._launched_step = step
        self.counts.num_checks += self.tracker.is_checking

    def retire(self, step: int) -> None:
        """That step has ended: what it could read and nobody holds is free."""
        self.manager.retire(step)

    def check(self) -> None:
        """PageError unless every page is accounted for: free, held by exactly those who say so, fenced, quarantined."""
        held = [page for request in self._holders.values() for page in request.pages]
        if self.prefix_index is not None:
            held += self.prefix_index.held_pages
        self.manager.check(held)

    def _forget(self, request: Request) -> list[HeldPage]:
        pages, request.pages = request.pages, []
        self._drop_row(request)
        del self._holders[request.request_id]
        return pages

    def _forget_in_index(self, pages: Sequence[HeldPage]) -> None:
        if self.prefix_index is not None:
            self.prefix_index.forget([held.page for held in pages], self._launched_step)

    def _drop_lost_entries(self, index: PrefixIndex) -> None:
        for held in index.take_lost(self._launched_step):
            self._report_lost(PREFIX_INDEX, NO_MISMATCH, held)

    def _report_lost(self, holder: str, place: int, held: HeldPage) -> None:
        found = self.tracker.tag_of(held.page)
        log_mismatch(PageMismatch(holder, place, held.page, held.tag, found, self._launched_step, "page_lost"))
        self.counts.num_lost_pages += 1
        self.manager.quarantine(held.page)

    def _drop_row(self, request: Request) -> None:
        if request.table_row is not None:
            self.tables.drop_row(request.table_row)
        request.table_row = None

    def _make_free(self, num_pages: int) -> bool:
        """Whether so many pages are free, after the prefix index gave up what it need not keep."""
        num_lacking = num_pages - self.manager.num_free
        if num_lacking > 0 and self.prefix_index is not None:
            self.prefix_index.evict(num_lacking, self._launched_step)
            self._drop_lost_entries(self.prefix_index)
        return num_pages <= self.manager.num_free


def _salt(request: Request) -> bytes:
    """The tenant's name as bytes, one for one: also of names that are no valid Unicode."""
    return request.tenant.encode("utf-8", "surrogatepass")


def device_of(pools: KvPools) -> torch.device:
    """The device that holds the pools."""
    layer = pools.layers[0]
    return (layer.pool if isinstance(layer, MlaLayerKv) else layer.key_pool).device
