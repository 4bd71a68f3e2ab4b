"""Shares of experts that fell back."""

from __future__ import annotations

import pytest

from memopt.compressor.calibrate.rounding_report import ExpertReport, fallback_share
from memopt.compressor.fallback_reason import FallbackReason


def _report(fallback: FallbackReason | None) -> ExpertReport:
    return ExpertReport(
        expert=0, num_tokens=1, method="plain", damping=None, num_dead_columns=0, energy=1.0, plain_error=0.1,
        weighted_error=None, error=0.1, num_rows=4, num_plain_rows=0, fallback=fallback,
    )  # fmt: skip


@pytest.mark.parametrize("reason", list(FallbackReason))
def test_every_reason_counts(reason: FallbackReason) -> None:
    assert fallback_share([_report(None), _report(reason), _report(None), _report(None)]) == 0.25


def test_nothing_has_fallen_back() -> None:
    assert fallback_share(()) == 0
    assert fallback_share((_report(None),)) == 0
