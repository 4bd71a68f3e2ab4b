"""How far one cache's predictions are from another's: KL and agreement, context by context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.kv_quality.forced_run import HiddenRows, TurnPlan, is_in_turn
from benchmarks.kv_quality.proof_models import Document
from memopt.compressor.evaluate.token_scores import LogitScores, score_logits
from memopt.runtime.model.decoder import Decoder

# Rows of a prompt that are scored, counted from its end.
SCORED_PROMPT_ROWS = 256
PROMPT, ANSWER = "prompt", "answer"
KINDS = (PROMPT, ANSWER)


@dataclass(frozen=True, slots=True)
class Score:
    """Of `num_tokens` predictions: KL(base || case) in nats, the share whose likeliest token is the same, and
    the perplexity of the case on the tokens that came."""

    num_tokens: int
    kl: float
    top1: float
    perplexity: float


@dataclass(frozen=True, slots=True)
class CaseScores:
    """`scores[kind][turn]` of the case with that name."""

    name: str
    scores: dict[str, tuple[Score, ...]]


def score_case(
    name: str, decoder: Decoder, base: HiddenRows, rows: HiddenRows, documents: Sequence[Document], plan: TurnPlan
) -> CaseScores:
    """Scores of the rows of every turn of `plan`, against the base's same rows; all of its documents together."""
    prompt: list[Score] = []
    answer: list[Score] = []
    for turn, end in enumerate(plan.ends):
        taken = {number: document for number, document in enumerate(documents) if is_in_turn(document, end)}
        prompt.append(_score(decoder, base.prompt, rows.prompt, taken, _prompt_rows(plan, turn)))
        answer.append(_score(decoder, base.answer, rows.answer, taken, _answer_rows(plan, turn)))
    return CaseScores(name, {PROMPT: tuple(prompt), ANSWER: tuple(answer)})


def _prompt_rows(plan: TurnPlan, turn: int) -> range:
    """The last rows of the prompt, as far as no turn before scored them."""
    end = plan.prompt_tokens(turn)
    first = plan.ends[turn - 1] if turn else 0
    return range(max(end - SCORED_PROMPT_ROWS, first), end)


def _answer_rows(plan: TurnPlan, turn: int) -> range:
    """The decode rows: the last token of an answer is never computed."""
    return range(plan.prompt_tokens(turn), plan.ends[turn] - 1)


@torch.inference_mode()
def _score(decoder: Decoder, base: Tensor, rows: Tensor, documents: Mapping[int, Document], positions: range) -> Score:
    parts: list[LogitScores] = []
    places = slice(positions.start, positions.stop)
    for number, document in documents.items():
        right, found = (decoder.logits(hidden[number, places].contiguous()) for hidden in (base, rows))
        next_ids = torch.tensor(document[positions.start + 1 : positions.stop + 1])
        parts.append(score_logits(right, found, next_ids))
    kl, surprise, same = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("kl", "release_surprise", "is_top1_same")
    )
    return Score(len(kl), float(kl.mean()), float(same.mean()), float(np.exp(surprise.mean())))
