"""Per-token figures of two models on the same tokens: KL, surprise of both, agreement on the likeliest token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from memopt.errors import NonFiniteError, ShapeError

if TYPE_CHECKING:
    from torch import Tensor

# Rows of logits that are in float64 at once: 32 rows of 151,552 words take 39 MB, and there are five such arrays.
CHUNK_ROWS = 32

Figures = np.ndarray[Any, np.dtype[np.float64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]
Counts = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Figures of N predictions, arrays [N].

    `kl`: KL(base || release) in nats. `base_surprise`, `release_surprise`: -log probability of the token that came.
    `is_top1_same`: both find the same token likeliest. `document`, `position`: which document, and which of its tokens
    was predicted. `context`: tokens of the window that the models had seen.
    """

    kl: Figures
    base_surprise: Figures
    release_surprise: Figures
    is_top1_same: Flags
    document: Counts
    position: Counts
    context: Counts

    def __len__(self) -> int:
        return len(self.kl)


@dataclass(frozen=True, slots=True)
class LogitScores:
    """The first four figures of TokenScores, for one window."""

    kl: Figures
    base_surprise: Figures
    release_surprise: Figures
    is_top1_same: Flags


def score_logits(base: Tensor, release: Tensor, next_ids: Tensor) -> LogitScores:
    """Figures of `base` and `release`, logits [T, V] of any float type; `next_ids` int64 [T]: the tokens that came.

    In float64 from the logits on: float32 would add up to 2e-6 to a token's KL. KL = sum p (log p - log q), p of the
    base (Kullback & Leibler 1951). Raises ShapeError for shapes that differ, NonFiniteError for logits that are not
    finite, naming the model.
    """
    import torch

    if base.ndim != 2 or base.shape != release.shape or next_ids.shape != base.shape[:1]:
        raise ShapeError(
            f"logits {list(base.shape)} and {list(release.shape)} for {list(next_ids.shape)} tokens",
            remedy="both models must have one vocabulary, and see the same tokens",
        )
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, base.shape[0], CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        for name, logits in (("base", base[rows]), ("release", release[rows])):
            if not bool(torch.isfinite(logits).all()):
                raise NonFiniteError(f"the {name}'s logits hold NaN or infinity", remedy="check its weights and dtype")
        log_p, log_q = (logits[rows].double().log_softmax(-1) for logits in (base, release))
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        came = next_ids[rows, None]
        same = base[rows].argmax(-1) == release[rows].argmax(-1)
        parts.append((kl, -log_p.gather(-1, came)[:, 0], -log_q.gather(-1, came)[:, 0], same))
    return LogitScores(*(torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True)))


def joined(scores: Sequence[TokenScores]) -> TokenScores:
    """All predictions of several windows, in order."""
    fields = ("kl", "base_surprise", "release_surprise", "is_top1_same", "document", "position", "context")
    return TokenScores(*(np.concatenate([getattr(part, field) for part in scores]) for field in fields))


def placed(scores: LogitScores, document: int, start: int) -> TokenScores:
    """`scores` of a window from token `start` of document number `document` on: row i predicts token i + 1."""
    count = len(scores.kl)
    context = np.arange(1, count + 1, dtype=np.int64)
    return TokenScores(
        scores.kl,
        scores.base_surprise,
        scores.release_surprise,
        scores.is_top1_same,
        np.full(count, document, dtype=np.int64),
        start + context,
        context,
    )
