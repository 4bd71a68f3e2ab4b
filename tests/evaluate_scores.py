"""Scores made up for tests of quality.json, the report and the gate."""

from __future__ import annotations

import numpy as np

from memopt.compressor.evaluate.calibration_data import DataDigest
from memopt.compressor.evaluate.quality import Conditions, ModelIdentity, Quality, measure_quality
from memopt.compressor.evaluate.task_scores import TaskScore
from memopt.compressor.evaluate.token_scores import TokenScores

WEIGHTS_SHA256 = "a" * 64


def made_scores(num_documents: int = 8, tokens: int = 40, seed: int = 0) -> TokenScores:
    """Scores of `num_documents` documents of `tokens` predictions each, later documents worse."""
    generator = np.random.default_rng(seed)
    document = np.repeat(np.arange(num_documents), tokens)
    context = np.tile(np.arange(1, tokens + 1), num_documents)
    kl = generator.gamma(0.3, 0.1, len(document)) * (1 + document)
    base = generator.gamma(2.0, 1.0, len(document))
    return TokenScores(kl, base, base + kl, generator.random(len(document)) < 0.9, document, context, context)


def made_quality(seed: int = 0, tasks: tuple[TaskScore, ...] = (), name: str = "release") -> Quality:
    """A Quality of made scores."""
    scores = made_scores(seed=seed)
    return measure_quality(
        scores,
        scores.document,
        base=ModelIdentity("source", "base", "b" * 64),
        release=ModelIdentity("release", name, WEIGHTS_SHA256),
        data=DataDigest("c" * 64, 1234, "text", 8, 328),
        conditions=Conditions(7, 41, 8, "float32", "fp32", "fp8_e4m3"),
        tasks=tasks,
    )
