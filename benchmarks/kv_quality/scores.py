"""How far one cache's predictions are from another's: KL and agreement, context by context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.kv_quality.forced_run import HiddenRows, TurnPlan
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
    """Scores of the rows of every turn of `plan`, against the base's same rows; all documents together."""
    found = {
        PROMPT: tuple(
            _score(decoder, base.prompt, rows.prompt, documents, _prompt_rows(plan, turn))
            for turn in range(len(plan.ends))
        ),
        ANSWER: tuple(
            _score(decoder, base.answer, rows.answer, documents, _answer_rows(plan, turn))
            for turn in range(len(plan.ends))
        ),
    }
    return CaseScores(name, found)


def _prompt_rows(plan: TurnPlan, turn: int) -> range:
    """The last rows of the prompt, as far as no turn before scored them."""
    end = plan.prompt_tokens(turn)
    first = plan.ends[turn - 1] if turn else 0
    return range(max(end - SCORED_PROMPT_ROWS, first), end)


def _answer_rows(plan: TurnPlan, turn: int) -> range:
    """The decode rows: the last token of an answer is never computed."""
    return range(plan.prompt_tokens(turn), plan.ends[turn] - 1)


@torch.inference_mode()
def _score(
    decoder: Decoder, base: torch.Tensor, rows: torch.Tensor, documents: Sequence[Document], positions: range
) -> Score:
    parts: list[LogitScores] = []
    for number, document in enumerate(documents):
        next_ids = torch.tensor([document[position + 1] for position in positions])
        places = slice(positions.start, positions.stop)
        logits = [decoder.logits(hidden[number, places].contiguous()) for hidden in (base, rows)]
        parts.append(score_logits(*logits, next_ids))
    kl, surprise, same = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("kl", "release_surprise", "is_top1_same")
    )
    return Score(len(kl), float(kl.mean()), float(same.mean()), float(np.exp(surprise.mean())))
