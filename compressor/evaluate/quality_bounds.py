"""What no measurement gives: a quality.json that says so was edited, and must not pass a gate."""

from __future__ import annotations

import math

from memopt.compressor.evaluate.quality import SOURCE_KIND, Quality
from memopt.compressor.evaluate.task_scores import POINTS
from memopt.manifests.digest import is_hex_digest

BASE_KINDS = (SOURCE_KIND, "checkpoint", "release")
RESAMPLED = ("document", "window")


def impossible_figure(quality: Quality) -> str | None:
    """The first figure of `quality` that cannot have been measured, in words; None for one that can.

    An interval's ends are in order and within the figure's range, counts fit each other, digests are digests.
    """
    for name, interval, largest in (
        ("kl", quality.kl, math.inf),
        ("top1", quality.top1, 1.0),
        ("base_perplexity", quality.base_perplexity, math.inf),
        ("release_perplexity", quality.release_perplexity, math.inf),
        ("perplexity_ratio", quality.perplexity_ratio, math.inf),
    ):
        if not (0 <= interval.low <= interval.high <= largest and 0 <= interval.value <= largest):
            return f"{name} is {interval.value:g} ({interval.low:g} to {interval.high:g})"
    for score in quality.tasks:
        if not (0 <= score.base <= POINTS and 0 <= score.release <= POINTS):
            return f"task {score.task} has {score.base:g} and {score.release:g} of {POINTS:g} points"
    if not 0 < quality.confidence < 1:
        return f"confidence is {quality.confidence:g}"
    for name, count, most in (
        ("num_tokens", quality.num_tokens, quality.data.num_tokens),
        ("num_documents", quality.num_documents, quality.data.num_documents),
        ("num_resampled_units", quality.num_resampled_units, quality.num_tokens),
    ):
        if not 1 <= count <= most:
            return f"{name} is {count:,} of {most:,}"
    for name, digest in (
        ("base", quality.base.sha256),
        ("release", quality.release.sha256),
        ("data", quality.data.sha256),
    ):
        if not is_hex_digest(digest):
            return f"{name}.sha256 is {digest[:80]!r}"
    for name, word, words in (
        ("base.kind", quality.base.kind, BASE_KINDS),
        ("resampled", quality.resampled, RESAMPLED),
    ):
        if word not in words:
            return f"{name} is {word[:80]!r}"
    return None
