"""What a release costs against its base: figures with intervals, by length of context, and the worst tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from memopt.compressor.evaluate.bootstrap import (
    CONFIDENCE,
    Interval,
    Resampling,
    exponential,
    mean_intervals,
    sums_by_unit,
)
from memopt.compressor.evaluate.calibration_data import DataDigest
from memopt.compressor.evaluate.task_scores import TaskScore
from memopt.compressor.evaluate.token_scores import Counts, Figures, TokenScores
from memopt.errors import DataFileError

# A bucket holds the predictions from this many tokens of context on, up to the next edge.
CONTEXT_EDGES = (1, 32, 128, 512, 2_048, 8_192, 32_768, 131_072)
PERCENTILES = (50.0, 90.0, 99.0, 99.9)
NUM_WORST = 20
# With fewer documents, windows are resampled; an interval from fewer of either holds for nothing (gate.py).
MIN_UNITS_TO_RESAMPLE = 5
SOURCE_KIND = "source"
# Points of the plot of KL by position.
MAX_POSITION_BINS = 64


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Which weights were measured.

    `kind`: "release"; "source", the checkpoint that it was made from; or "checkpoint", another one. `name`: of its
    folder. `sha256` (hex): over the digests and names of a release's tensors, whatever its layout
    (release_weights.py), or of the tensors that were read of a checkpoint.
    """

    kind: str
    name: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Conditions:
    """How it was measured. `compute`: type of activations. `kv_cache`: the release's format."""

    seed: int
    window_tokens: int
    num_windows: int
    compute: str
    base_kv_cache: str
    kv_cache: str


@dataclass(frozen=True, slots=True)
class ContextFigures:
    """Means over the predictions with `first` to `last` tokens of context."""

    first: int
    last: int
    num_tokens: int
    kl: float
    top1: float
    base_perplexity: float
    release_perplexity: float


@dataclass(frozen=True, slots=True)
class WorstToken:
    """A prediction of large KL: where it is, never what it is. Documents count from 0, as in the data file."""

    document: int
    position: int
    context: int
    kl: float
    base_surprise: float
    release_surprise: float


@dataclass(frozen=True, slots=True)
class PositionBin:
    """Mean KL of `num_tokens` predictions whose context has `first` to `last` tokens."""

    first: int
    last: int
    num_tokens: int
    kl: float


@dataclass(frozen=True, slots=True)
class Quality:
    """Everything that quality.json says. `resampled`: "document" or "window", what the intervals redraw.

    `num_documents`: that tokens were predicted in. `kl` in nats a token, `top1` and shares as parts of 1, surprises in
    nats. `kl_percentiles`: (percentile, KL).
    """

    base: ModelIdentity
    release: ModelIdentity
    data: DataDigest
    conditions: Conditions
    num_tokens: int
    num_documents: int
    resampled: str
    num_resampled_units: int
    num_resamples: int
    confidence: float
    kl: Interval
    top1: Interval
    base_perplexity: Interval
    release_perplexity: Interval
    perplexity_ratio: Interval
    kl_percentiles: tuple[tuple[float, float], ...]
    kl_max: float
    by_context: tuple[ContextFigures, ...]
    by_position: tuple[PositionBin, ...]
    worst: tuple[WorstToken, ...]
    tasks: tuple[TaskScore, ...] = field(default=())


def measure_quality(
    scores: TokenScores,
    window: Counts,
    *,
    base: ModelIdentity,
    release: ModelIdentity,
    data: DataDigest,
    conditions: Conditions,
    tasks: Sequence[TaskScore] = (),
) -> Quality:
    """The figures of `scores` [N]; `window` [N]: the number of the window that each prediction is in, from zero.

    Pure: the same scores and seed give the same result. DataFileError for no predictions.
    """
    if not len(scores):
        raise DataFileError("no token was predicted", remedy="give longer documents")
    present, unit = np.unique(scores.document, return_inverse=True)
    num_documents, resampled = len(present), "document"
    if num_documents < MIN_UNITS_TO_RESAMPLE:
        present, unit = np.unique(window, return_inverse=True)
        resampled = "window"
    draws = Resampling(len(present), conditions.seed)
    # KL is not below zero; sums of rounded terms may be, by 1e-15.
    kl = np.maximum(scores.kl, 0.0)
    figures = (
        kl,
        scores.is_top1_same.astype(np.float64),
        scores.base_surprise,
        scores.release_surprise,
        scores.release_surprise - scores.base_surprise,
    )
    sums = np.stack([sums_by_unit(values, unit, draws.num_units) for values in figures])
    num_tokens = np.bincount(unit, minlength=draws.num_units).astype(np.float64)
    of_kl, of_top1, of_base, of_release, of_ratio = mean_intervals(sums, num_tokens, draws)
    return Quality(
        base=base,
        release=release,
        data=data,
        conditions=conditions,
        num_tokens=len(scores),
        num_documents=num_documents,
        resampled=resampled,
        num_resampled_units=draws.num_units,
        num_resamples=draws.num_resamples,
        confidence=CONFIDENCE,
        kl=of_kl,
        top1=of_top1,
        base_perplexity=exponential(of_base),
        release_perplexity=exponential(of_release),
        perplexity_ratio=exponential(of_ratio),
        kl_percentiles=tuple((rank, float(np.percentile(kl, rank))) for rank in PERCENTILES),
        kl_max=float(kl.max()),
        by_context=_by_context(scores),
        by_position=_by_position(scores),
        worst=_worst(scores),
        tasks=tuple(tasks),
    )


def _by_context(scores: TokenScores) -> tuple[ContextFigures, ...]:
    """Figures of every bucket of CONTEXT_EDGES that holds a prediction."""
    figures: list[ContextFigures] = []
    last_of_all = int(scores.context.max())
    for first, next_first in zip(CONTEXT_EDGES, (*CONTEXT_EDGES[1:], last_of_all + 1), strict=True):
        inside = (scores.context >= first) & (scores.context < next_first)
        if inside.any():
            figures.append(
                ContextFigures(
                    first,
                    min(next_first - 1, last_of_all),
                    int(inside.sum()),
                    float(np.maximum(scores.kl[inside], 0).mean()),
                    float(scores.is_top1_same[inside].mean()),
                    _perplexity(scores.base_surprise[inside]),
                    _perplexity(scores.release_surprise[inside]),
                )
            )
    return tuple(figures)


def _perplexity(surprise: Figures) -> float:
    mean = float(surprise.mean())
    return exponential(Interval(mean, mean, mean)).value


def _by_position(scores: TokenScores) -> tuple[PositionBin, ...]:
    """Mean KL in at most MAX_POSITION_BINS equal stretches of context."""
    last = int(scores.context.max())
    width = -(-last // MAX_POSITION_BINS)
    number = (scores.context - 1) // width
    count = np.bincount(number)
    total = np.bincount(number, weights=np.maximum(scores.kl, 0))
    return tuple(
        PositionBin(
            index * width + 1, min((index + 1) * width, last), int(count[index]), float(total[index] / count[index])
        )
        for index in range(len(count))
        if count[index]
    )


def _worst(scores: TokenScores) -> tuple[WorstToken, ...]:
    """The NUM_WORST largest KLs, largest first, the earlier one first among equals."""
    order = np.argsort(-scores.kl, kind="stable")[:NUM_WORST]
    return tuple(
        WorstToken(
            int(scores.document[index]),
            int(scores.position[index]),
            int(scores.context[index]),
            max(float(scores.kl[index]), 0.0),
            float(scores.base_surprise[index]),
            float(scores.release_surprise[index]),
        )
        for index in order
    )
