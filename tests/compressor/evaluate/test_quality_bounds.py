"""A quality.json whose figures nobody can have measured is no quality.json."""

from __future__ import annotations

from dataclasses import replace

import pytest
from evaluate_scores import made_quality

from memopt.compressor.evaluate.bootstrap import Interval
from memopt.compressor.evaluate.quality import Quality
from memopt.compressor.evaluate.quality_bounds import impossible_figure
from memopt.compressor.evaluate.quality_file import parse_quality, render_quality
from memopt.compressor.evaluate.task_scores import TaskScore
from memopt.errors import QualityFileError

TASK = TaskScore("gsm8k", "exact_match,strict-match", 200, 71.5, 3.2, 70.9, 3.2)
MEASURED = made_quality(tasks=(TASK,))


def test_what_was_measured_is_possible() -> None:
    assert impossible_figure(MEASURED) is None
    # The ends of what is possible: nothing lost, every token another one.
    edge = replace(MEASURED, kl=Interval(0.0, 0.0, 0.0), top1=Interval(1.0, 0.0, 1.0))
    assert impossible_figure(edge) is None


@pytest.mark.parametrize(
    ("edited", "words"),
    [
        (replace(MEASURED, kl=Interval(0.04, -0.1, 0.05)), r"kl is 0\.04 \(-0\.1 to 0\.05\)"),
        (replace(MEASURED, kl=Interval(0.04, 0.03, -1.0)), r"kl is 0\.04 \(0\.03 to -1\)"),
        (replace(MEASURED, kl=Interval(0.04, 0.4, 0.0)), r"kl is 0\.04 \(0\.4 to 0\)"),
        (replace(MEASURED, kl=Interval(-0.04, 0.0, 0.1)), r"kl is -0\.04"),
        (replace(MEASURED, top1=Interval(0.9, 0.8, 5.0)), r"top1 is 0\.9 \(0\.8 to 5\)"),
        (replace(MEASURED, perplexity_ratio=Interval(1.0, 1.1, 0.9)), r"perplexity_ratio is 1 \(1\.1 to 0\.9\)"),
        (replace(MEASURED, tasks=(replace(TASK, release=100.5),)), r"task gsm8k has 71\.5 and 100\.5 of 100 points"),
        (replace(MEASURED, tasks=(replace(TASK, base=-1.0),)), "task gsm8k has -1"),
        (replace(MEASURED, confidence=0.0), "confidence is 0"),
        (replace(MEASURED, num_tokens=0), "num_tokens is 0"),
        (replace(MEASURED, num_tokens=329), "num_tokens is 329 of 328"),
        (replace(MEASURED, num_documents=9), "num_documents is 9 of 8"),
        (replace(MEASURED, num_resampled_units=321), "num_resampled_units is 321 of 320"),
        (replace(MEASURED, base=replace(MEASURED.base, sha256="B" * 64)), r"base\.sha256 is 'BBB"),
        (replace(MEASURED, data=replace(MEASURED.data, sha256="")), r"data\.sha256 is ''"),
        (replace(MEASURED, base=replace(MEASURED.base, kind="sources")), r"base\.kind is 'sources'"),
        (replace(MEASURED, resampled="token"), "resampled is 'token'"),
    ],
)
def test_what_nobody_measured_is_refused(edited: Quality, words: str) -> None:
    with pytest.raises(QualityFileError, match=f"{words}.*no measurement gives that"):
        parse_quality(render_quality(edited))
