"""Runs one step on the device: check, forward pass, sampling, and one copy of the results to the host."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

import torch
from torch import Tensor

from memopt.errors import PageError
from memopt.runtime.engine.sampler import Pick, choose_tokens, finite_rows
from memopt.runtime.engine.step_builder import BuiltStep, build_step
from memopt.runtime.engine.step_plan import StepPlan
from memopt.runtime.integrity.tracker import PageTracker
from memopt.runtime.kv.block_tables import BlockTables
from memopt.runtime.kv.layer_kv import KvPools
from memopt.runtime.model.step_rows import StepRows
from memopt.runtime.parallel.communicator import Communicator


class Model(Protocol):
    """What a step needs of a decoder (model/decoder.py)."""

    def forward(self, rows: StepRows, pools: KvPools) -> Tensor:
        """Hidden values [R, hidden] before the final norm; the rows' keys are in the pools afterwards."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [N, vocab] of hidden values [N, hidden], of all ranks together."""
        ...


class Drafter(Protocol):
    """Guesses the token after the one that was just sampled (engine/speculative.py)."""

    def draft(self, hidden: Tensor, next_tokens: Tensor, rows: StepRows, pools: KvPools, sampled: Tensor) -> Tensor:
        """int64 [S], one guess for each row of `sampled` int64 [S].

        `hidden` [R, hidden]: the model's, before the final norm. `next_tokens` int64 [R]: the token after each row's.
        """
        ...


@dataclass(frozen=True, slots=True)
class RequestResult:
    """What a step found for one request.

    `token_ids`: one for each of its sampled rows, `draft_ids` the guess behind each of these; both empty while its
    prompt is not complete. `num_finite`: rows from the first on whose logits are finite. `first_mismatch`: index of the
    first page with a wrong tag, None when all are right.
    """

    token_ids: tuple[int, ...]
    draft_ids: tuple[int, ...]
    num_finite: int
    first_mismatch: int | None


class ModelRunner:
    """A model, its pools and tables, and who watches the pages."""

    def __init__(
        self,
        model: Model,
        pools: KvPools,
        tables: BlockTables,
        tracker: PageTracker,
        communicator: Communicator,
        drafter: Drafter | None = None,
    ) -> None:
        self._model = model
        self._pools = pools
        self._tables = tables
        self._tracker = tracker
        self._communicator = communicator
        self._drafter = drafter

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> tuple[RequestResult, ...]:
        """Compute the plan's rows and sample where a request's known tokens end: one result for each of its requests.

        The host waits once, at the end. Raises PageError when a key's slot was not in the pools, which a store on a GPU
        notes and passes over; on the CPU the store itself refuses it.
        """
        has_drafter = self._drafter is not None
        built = build_step(plan, self._tables, self._tracker, self._communicator, needs_next_tokens=has_drafter)
        hidden = self._model.forward(built.rows, self._pools)
        picks = _picks(plan)
        tokens, is_finite = self._sample(built, hidden, picks)
        parts = [tokens, is_finite]
        if self._drafter is not None and built.next_tokens is not None:
            parts.append(self._draft(self._drafter, built, hidden, tokens, built.next_tokens))
        if built.check is not None:
            parts += [built.check.flags.to(torch.int64), built.check.first_mismatch.to(torch.int64)]
        bad_slot = self._pools.bad_slot
        if bad_slot is not None:
            parts.append(bad_slot.to(torch.int64))
        # The one place where the host waits for the device.
        numbers = torch.cat(parts).tolist()
        if bad_slot is not None and numbers.pop():
            bad_slot.zero_()
            raise PageError(
                f"a step stored keys past the {self._pools.num_pages} pages of the KV cache, where they are lost",
                remedy="this is a fault of memopt: report it, with the step's requests",
            )
        return _split(plan, numbers, len(picks), has_drafts=has_drafter, is_checked=built.check is not None)

    def _sample(self, built: BuiltStep, hidden: Tensor, picks: list[Pick]) -> tuple[Tensor, Tensor]:
        """Tokens and whether their logits are finite, int64 [S] each; rank 0's, so that ranks never part ways."""
        if not picks:
            nothing = torch.empty(0, dtype=torch.int64, device=hidden.device)
            return nothing, nothing
        if built.sampled_rows is not None:
            hidden = hidden.index_select(0, built.sampled_rows)
        logits = self._model.logits(hidden)
        tokens, is_finite = choose_tokens(logits, picks), finite_rows(logits).to(torch.int64)
        if self._communicator.num_ranks > 1:
            tokens, is_finite = self._communicator.from_first(torch.stack((tokens, is_finite))).unbind(0)
        return tokens, is_finite

    def _draft(self, drafter: Drafter, built: BuiltStep, hidden: Tensor, tokens: Tensor, next_tokens: Tensor) -> Tensor:
        """A guess for each sampled row; rank 0's."""
        sampled = built.sampled_rows
        if sampled is None:
            sampled = torch.arange(tokens.shape[0], device=tokens.device)
        next_tokens[sampled] = tokens
        return self._communicator.from_first(drafter.draft(hidden, next_tokens, built.rows, self._pools, sampled))


def _picks(plan: StepPlan) -> list[Pick]:
    picks = []
    for item in plan.scheduled:
        end = item.first_position + item.num_rows
        picks += [Pick(item.request.params, position + 1) for position in range(end - item.num_samples, end)]
    return picks


def _split(
    plan: StepPlan, numbers: list[int], num_picks: int, *, has_drafts: bool, is_checked: bool
) -> tuple[RequestResult, ...]:
    """The copied numbers, request by request: tokens, finite, then drafts, then flags and first mismatches by row."""
    tokens, is_finite = numbers[:num_picks], numbers[num_picks : 2 * num_picks]
    rest = numbers[2 * num_picks :]
    drafts, checks = (rest[:num_picks], rest[num_picks:]) if has_drafts else ([], rest)
    flags, firsts = checks[: len(checks) // 2], checks[len(checks) // 2 :]
    results = []
    start = 0
    for item in plan.scheduled:
        row, stop = item.request.table_row, start + item.num_samples
        mismatch = firsts[row] if is_checked and row is not None and flags[row] else None
        num_finite = sum(1 for _ in takewhile(bool, is_finite[start:stop]))
        results.append(RequestResult(tuple(tokens[start:stop]), tuple(drafts[start:stop]), num_finite, mismatch))
        start = stop
    return tuple(results)
