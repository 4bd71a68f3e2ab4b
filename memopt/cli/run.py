"""Running a job on a terminal: progress while it runs, what it made when it ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

import click

from memopt.cli.output import duration_text, print_verdict, size_text
from memopt.compressor.calibration_summary import CalibrationSummary
from memopt.compressor.ledger import LARGEST_FIGURE, ErrorSummary
from memopt.compressor.pipeline import RunResult
from memopt.compressor.progress import WRITE_STAGE, Progress

PLAIN_INTERVAL_SECONDS = 10.0


def _say(line: str) -> None:
    # The work goes on when the log's reader went away (`2>&1 | head`).
    with suppress(BrokenPipeError):
        click.echo(line, err=True)


def pace_text(rate_bytes_per_second: float, remaining_seconds: float | None) -> str:
    """This run's own rate, and the time left at it: what an earlier run did must be in neither."""
    left = "" if remaining_seconds is None else f", {duration_text(remaining_seconds)} left"
    return f"{rate_bytes_per_second / 1e9:.2f} GB/s{left}"


class DownloadPace:
    """The pace of a download, stage by stage; what was there when a stage was first told of does not count."""

    def __init__(self) -> None:
        self._stage = ""
        self._started = 0.0
        self._first_bytes = 0

    def text(self, stage: str, done_bytes: int, total_bytes: int) -> str:
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._started, self._first_bytes = stage, now, done_bytes
        own_bytes, seconds = done_bytes - self._first_bytes, now - self._started
        if own_bytes <= 0 or seconds <= 0:
            return ""
        return pace_text(own_bytes / seconds, (total_bytes - done_bytes) * seconds / own_bytes)


def _pace_of(progress: Progress) -> str:
    return pace_text(progress.rate_bytes_per_second, progress.remaining_seconds)


class PlainProgress:
    """A line on standard error now and then, for logs."""

    def __init__(self) -> None:
        self._last = 0.0

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        is_last = progress.num_done_units == progress.num_units
        if now - self._last < PLAIN_INTERVAL_SECONDS and not is_last:
            return
        self._last = now
        stage = "" if progress.stage == WRITE_STAGE else f"{progress.stage} "
        _say(
            f"{stage}{size_text(progress.done_bytes)} of {size_text(progress.total_bytes)}, {_pace_of(progress)},"
            f" file {progress.num_done_units} of {progress.num_units} done: {progress.current_unit}"
        )

    def download(self, stage: str, file: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._last >= PLAIN_INTERVAL_SECONDS or done == total:
            self._last = now
            _say(f"{stage} {size_text(done)} of {size_text(total)}: {file}")


class BarProgress:
    """A rich bar with rate, time left and the current file.

    Rich would count an earlier run's bytes as this second's, so that the pace is the job's own.
    """

    def __init__(self, bar: Any, task: Any) -> None:
        self._bar = bar
        self._task = task
        self._download = DownloadPace()

    def __call__(self, progress: Progress) -> None:
        self._bar.update(
            self._task,
            total=progress.total_bytes,
            completed=progress.done_bytes,
            description=f"{'' if progress.stage == WRITE_STAGE else f'{progress.stage} '}"
            f"{progress.num_done_units}/{progress.num_units} {progress.current_unit}",
            pace=_pace_of(progress),
        )

    def download(self, stage: str, file: str, done: int, total: int) -> None:
        pace = self._download.text(stage, done, total)
        self._bar.update(self._task, total=total, completed=done, description=f"{stage} {file}", pace=pace)


@contextmanager
def progress_display(*, quiet: bool) -> Iterator[Any]:
    """A progress callback that suits standard error: a bar on a terminal, plain lines elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield PlainProgress()
        return
    from rich.progress import BarColumn, DownloadColumn, TextColumn
    from rich.progress import Progress as RichProgress

    from memopt.cli.tables import make_console

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=False),
        TextColumn("{task.fields[pace]}"),
    )
    with RichProgress(*columns, console=make_console(stderr=True)) as bar:
        yield BarProgress(bar, bar.add_task("reading headers", total=None, pace=""))


def error_text(figures: ErrorSummary) -> str:
    """A role's error figures in words."""
    is_known = figures.relative_mse < LARGEST_FIGURE
    relative = f"{figures.relative_mse:.5f}" if is_known else "unknown (its sums overflowed)"
    return f"relative MSE {relative}, largest {figures.max_error:.4g}, clipped {figures.clipped_share:.2%}"


def calibration_text(summary: CalibrationSummary) -> str:
    """What calibration brought to a role, in words."""
    errors = f"output error {summary.output_error:.5f}, rounded plainly {summary.plain_output_error:.5f}"
    fallbacks = f"{summary.num_fallbacks:,} of {summary.num_weights:,} weights fell back"
    return f"{errors}; {fallbacks}; {summary.fewest_tokens:,} tokens or more each"


def files_text(result: RunResult) -> str:
    """How many weight files of which kind were made."""
    num_hub_files = result.num_units if "hub" in result.layouts else 0
    counts = ((num_hub_files, "weight file"), (result.num_rank_files, "rank file"))
    return " and ".join(f"{count} {name}{'' if count == 1 else 's'}" for count, name in counts if count)


def report(command: str, result: RunResult, next_step: str, *, as_json: bool) -> None:
    """Say what was made, where, how big, and what to do next."""
    if as_json:
        print_verdict(command, asdict(result) | {"out": str(result.out)})
        return
    if result.was_complete:
        click.echo(
            f"{result.out} is complete already: {size_text(result.total_size_bytes)}, every byte as the ledger says"
        )
    else:
        resumed = f", {result.num_resumed_units} of them from an interrupted run" if result.num_resumed_units else ""
        own_size_bytes = result.input_size_bytes - result.resumed_size_bytes
        rate = own_size_bytes / 1e9 / max(result.seconds, 1e-9)
        click.echo(f"made        {result.out}: {files_text(result)}{resumed}")
        click.echo(
            f"size        {size_text(result.input_size_bytes)} -> {size_text(result.weights_size_bytes)} of weights"
        )
        if result.written_size_bytes != result.weights_size_bytes:
            click.echo(f"written     {size_text(result.written_size_bytes)}: {' and '.join(result.layouts)} files")
        click.echo(f"time        {duration_text(result.seconds)}, {rate:.2f} GB/s of source")
        for role, figures in result.errors_by_role.items():
            click.echo(f"rounding    {role}: {error_text(figures)}")
        for role, summary in result.calibration_by_role.items():
            click.echo(f"calibrated  {role}: {calibration_text(summary)}")
    if result.left_behind:
        click.echo(f"not copied  {', '.join(result.left_behind)}: about the release that was read alone")
    if result.root_digest is not None:
        click.echo(f"signed      root digest {result.root_digest}")
    for note in result.sign_notes:
        click.echo(f"note        {note}")
    click.echo(f"next        {next_step}")
