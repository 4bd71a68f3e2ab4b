"""What a run says of its pace and its errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memopt.cli import run
from memopt.cli.run import BarProgress, PlainProgress, error_text, report
from memopt.compressor.ledger import LARGEST_FIGURE, ErrorSummary
from memopt.compressor.pipeline import RunResult
from memopt.compressor.progress import CHECK_STAGE, Progress

RESUMED = Progress(900, 1000, 9, 8, 10, "model-00010-of-00010.safetensors", 2e9, 50.0)


class Bar:
    """Keeps what a rich bar is told."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}

    def update(self, _task: int, **fields: Any) -> None:
        self.fields = fields


def test_the_bars_pace_is_the_jobs_own() -> None:
    bar = Bar()
    BarProgress(bar, 0)(RESUMED)
    assert bar.fields["pace"].startswith("2.00 GB/s, 50")
    assert (bar.fields["completed"], bar.fields["total"]) == (900, 1000)
    assert bar.fields["description"] == "9/10 model-00010-of-00010.safetensors"


@pytest.mark.parametrize(("stage", "first"), [("write", "900 B of"), (CHECK_STAGE, "check 900 B of")])
def test_a_check_is_called_one(stage: Any, first: str, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(*(getattr(RESUMED, name) for name in RESUMED.__dataclass_fields__ if name != "stage"), stage)
    PlainProgress()(progress)
    bar = Bar()
    BarProgress(bar, 0)(progress)
    assert capsys.readouterr().err.startswith(first)
    assert bar.fields["description"].startswith("check ") == (stage == CHECK_STAGE)


def test_a_resumed_download_is_not_faster_than_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(run.time, "monotonic", lambda: now[0])
    bar = Bar()
    progress = BarProgress(bar, 0)
    progress.download("download", "a", 8 * 10**9, 12 * 10**9)
    assert bar.fields["pace"] == ""
    now[0] += 2
    progress.download("download", "a", 9 * 10**9, 12 * 10**9)
    assert bar.fields["pace"].startswith("0.50 GB/s, 6")
    progress.download("verify", "a", 10**9, 12 * 10**9)
    assert bar.fields["pace"] == "", "another stage has its own start"


def test_the_rate_at_the_end_leaves_out_what_an_earlier_run_read(capsys: pytest.CaptureFixture[str]) -> None:
    result = RunResult(Path("out"), 10, 9, 10**9, 10**9, 10 * 10**9, 9 * 10**9, {}, 2.0, was_complete=False)
    report("compress", result, "go on", as_json=False)
    assert "0.50 GB/s of source" in capsys.readouterr().out


def test_an_overflowed_figure_is_said_in_words() -> None:
    assert error_text(ErrorSummary(LARGEST_FIGURE, 1e24, 0.0)) == (
        "relative MSE unknown (its sums overflowed), largest 1e+24, clipped 0.00%"
    )
    assert error_text(ErrorSummary(0.0123, 0.5, 0.25)) == "relative MSE 0.01230, largest 0.5, clipped 25.00%"
