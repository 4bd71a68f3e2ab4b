"""Runs documents through the real engine, whose sampled tokens are replaced by the documents' own.

A turn is a request: its prompt is the document up to there, its answer the next tokens. Scheduler, prefix cache, pages
and attention are the engine's; hidden states of every row are kept, by what the row was: a prompt's or an answer's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from benchmarks.kv_quality.proof_models import Document
from memopt.kernels.layout import PAGE_TOKENS
from memopt.runtime.engine.admission import pages_for
from memopt.runtime.engine.engine_core import EngineCore
from memopt.runtime.engine.engine_options import EngineOptions
from memopt.runtime.engine.new_core import PlacePools, new_core
from memopt.runtime.engine.request import Request, RequestState
from memopt.runtime.engine.sampling_params import SamplingParams
from memopt.runtime.engine.verified_model import VerifiedModel
from memopt.runtime.kv.kv_scales import KvScales
from memopt.runtime.kv.layer_kv import KvPools
from memopt.runtime.model.decoder import Decoder
from memopt.runtime.model.step_rows import StepRows
from memopt.runtime.parallel.communicator import SingleRank


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """Turn t ends at token `ends[t]` of a document, its last `answer_tokens` tokens are the answer.

    `chunk_rows`: rows of a step, so the longest chunk of a prompt. `reuses_pages`: turns share pages by the prefix
    cache; there is only one turn otherwise.
    """

    ends: tuple[int, ...]
    answer_tokens: int
    chunk_rows: int
    reuses_pages: bool

    def prompt_tokens(self, turn: int) -> int:
        """Length of that turn's prompt."""
        return self.ends[turn] - self.answer_tokens


def is_in_turn(document: Document, end: int) -> bool:
    """Whether a document has the tokens of a turn that ends at `end`, and one that follows."""
    return len(document) > end


@dataclass
class HiddenRows:
    """Hidden states float32 [documents, tokens, hidden] before the final norm; NaN for rows that were not computed."""

    prompt: Tensor
    answer: Tensor

    @staticmethod
    def empty(num_documents: int, num_tokens: int, hidden_size: int) -> HiddenRows:
        """Nothing computed yet."""
        shape = (num_documents, num_tokens, hidden_size)
        return HiddenRows(torch.full(shape, torch.nan), torch.full(shape, torch.nan))


def same_bits(first: Tensor, second: Tensor) -> Tensor:
    """bool [R]: rows of two float32 tensors [R, H] that are equal bit by bit."""
    return (first.contiguous().view(torch.int32) == second.contiguous().view(torch.int32)).all(dim=1)


class DifferentBitsError(RuntimeError):
    """The same row was computed twice, and did not come out the same."""


@dataclass
class RowRecorder:
    """Keeps what the decoder computes for `requests`, one a document. `is_repeatable`: rows must not change."""

    rows: HiddenRows
    requests: Sequence[Request] = ()
    is_repeatable: bool = True

    def record(self, rows: StepRows, hidden: Tensor) -> None:
        """Keep the rows of a step, each as it was computed first. DifferentBitsError if it has other bits now."""
        first_pages = {request.pages[0].page: number for number, request in enumerate(self.requests) if request.pages}
        documents = torch.tensor([first_pages[page] for page in rows.block_table[:, 0].tolist()])
        num_prompt_rows = rows.num_prefill_rows
        self._keep(
            self.rows.prompt, documents[:num_prompt_rows], rows.positions[:num_prompt_rows], hidden[:num_prompt_rows]
        )
        self._keep(
            self.rows.answer, documents[num_prompt_rows:], rows.positions[num_prompt_rows:], hidden[num_prompt_rows:]
        )

    def _keep(self, kept: Tensor, documents: Tensor, positions: Tensor, hidden: Tensor) -> None:
        before = kept[documents, positions]
        is_new = before.isnan().all(dim=1)
        num_changed = int((~is_new & ~same_bits(before, hidden)).sum())
        if self.is_repeatable and num_changed:
            raise DifferentBitsError(f"{num_changed} rows have other bits when they are computed again")
        kept[documents, positions] = torch.where(is_new[:, None], hidden, before)


@dataclass(frozen=True)
class RecordingDecoder(Decoder):
    """A decoder that tells a recorder what it computed."""

    recorder: RowRecorder | None = None

    def forward(self, rows: StepRows, pools: KvPools) -> Tensor:
        """As `Decoder.forward`."""
        hidden = Decoder.forward(self, rows, pools)
        if self.recorder is not None:
            self.recorder.record(rows, hidden)
        return hidden


def forced_run(
    model: VerifiedModel,
    kv_cache: str,
    scales: KvScales,
    documents: Sequence[Document],
    plan: TurnPlan,
    *,
    place: PlacePools | None = None,
    after_first_turn: Callable[[EngineCore], None] | None = None,
) -> HiddenRows:
    """All documents at once, turn by turn, through one engine in float32.

    `documents`: the longest first, with different first pages; a turn takes those that go on behind its end. `place`
    may give other pools, and `after_first_turn` spoil the engine. Raises RuntimeError when a request did not run as it
    should, DifferentBitsError when a row was computed again with other bits.
    """
    options = EngineOptions(
        dtype="float32",
        kv_cache=kv_cache,
        # The prefix cache keeps a document's full pages; a request has its last, open page to itself.
        num_pages=len(documents) * (pages_for(plan.ends[-1]) + 1) + 1,
        max_requests=len(documents),
        max_step_tokens=plan.chunk_rows,
        max_tokens=plan.ends[-1],
        prefix_cache=plan.reuses_pages,
    )
    config = model.decoder.config
    recorder = RowRecorder(HiddenRows.empty(len(documents), plan.ends[-1], config.hidden_size))
    parts = {part.name: getattr(model.decoder, part.name) for part in fields(Decoder)}
    recording = RecordingDecoder(**parts, recorder=recorder)
    core = new_core(replace(model, decoder=recording, scales=scales), options, SingleRank(), place=place)
    params = SamplingParams(max_tokens=plan.answer_tokens, ignore_eos=True)
    for turn in range(len(plan.ends)):
        if turn == 1 and after_first_turn is not None:
            after_first_turn(core)
            recorder.is_repeatable = False
        long_enough = [document for document in documents if is_in_turn(document, plan.ends[turn])]
        requests = [core.submit(document[: plan.prompt_tokens(turn)], params) for document in long_enough]
        recorder.requests = requests
        _run_turn(core, requests, long_enough)
        _require_reuse(requests, plan, turn)
    core.pages.check()
    return recorder.rows


def _run_turn(core: EngineCore, requests: Sequence[Request], documents: Sequence[Document]) -> None:
    """Steps until all requests have ended; each token that was sampled becomes the document's."""
    while core.has_work:
        core.step()
        for request, document in zip(requests, documents, strict=True):
            if request.num_generated:
                request.tokens[-1] = document[len(request.tokens) - 1]


def _require_reuse(requests: Sequence[Request], plan: TurnPlan, turn: int) -> None:
    """RuntimeError unless each request ran to its end over the pages of the turn before."""
    num_reused = plan.prompt_tokens(turn - 1) // PAGE_TOKENS * PAGE_TOKENS if turn else 0
    for request in requests:
        if request.finish_reason != "length" or request.state is not RequestState.FINISHED:
            raise RuntimeError(f"a request of turn {turn + 1} ended with {request.finish_reason}")
        if request.num_reused_tokens != num_reused:
            raise RuntimeError(f"turn {turn + 1} reused {request.num_reused_tokens} tokens, not {num_reused}")
