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
from memopt.compressor.pipeline import RunResult
from memopt.compressor.progress import Progress

PLAIN_INTERVAL_SECONDS = 10.0


def _say(line: str) -> None:
    # The work goes on when the log's reader went away (`2>&1 | head`).
    with suppress(BrokenPipeError):
        click.echo(line, err=True)


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
        left = "" if progress.remaining_seconds is None else f", {duration_text(progress.remaining_seconds)} left"
        _say(
            f"{size_text(progress.done_bytes)} of {size_text(progress.total_bytes)},"
            f" {progress.rate_bytes_per_second / 1e9:.2f} GB/s{left},"
            f" file {progress.num_done_units} of {progress.num_units} done: {progress.current_unit}"
        )

    def download(self, stage: str, file: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._last >= PLAIN_INTERVAL_SECONDS or done == total:
            self._last = now
            _say(f"{stage} {size_text(done)} of {size_text(total)}: {file}")


class BarProgress:
    """A rich bar with rate, time left and the current file."""

    def __init__(self, bar: Any, task: Any) -> None:
        self._bar = bar
        self._task = task

    def __call__(self, progress: Progress) -> None:
        self._bar.update(
            self._task,
            total=progress.total_bytes,
            completed=progress.done_bytes,
            description=f"{progress.num_done_units}/{progress.num_units} {progress.current_unit}",
        )

    def download(self, stage: str, file: str, done: int, total: int) -> None:
        self._bar.update(self._task, total=total, completed=done, description=f"{stage} {file}")


@contextmanager
def progress_display(*, quiet: bool) -> Iterator[Any]:
    """A progress callback that suits standard error: a bar on a terminal, plain lines elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield PlainProgress()
        return
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as RichProgress

    from memopt.cli.tables import make_console

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=False),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=make_console(stderr=True)) as bar:
        yield BarProgress(bar, bar.add_task("reading headers", total=None))


def report(command: str, result: RunResult, next_step: str, *, as_json: bool) -> None:
    """Say what was made, where, how big, and what to do next."""
    if as_json:
        fields = asdict(result) | {"out": str(result.out)}
        fields["errors_by_role"] = {
            role: {
                "relative_mse": figures.relative_mse,
                "max_error": figures.max_error,
                "clipped_share": figures.clipped_share,
            }
            for role, figures in result.errors_by_role.items()
        }
        print_verdict(command, fields)
        return
    if result.was_complete:
        click.echo(f"{result.out} is complete already: {size_text(result.total_size_bytes)}; nothing was done")
    else:
        resumed = f", {result.num_resumed_units} of them from an interrupted run" if result.num_resumed_units else ""
        rate = result.input_size_bytes / 1e9 / max(result.seconds, 1e-9)
        click.echo(f"made        {result.out}: {result.num_units} weight files{resumed}")
        click.echo(
            f"size        {size_text(result.input_size_bytes)} -> {size_text(result.weights_size_bytes)} of weights"
        )
        click.echo(f"time        {duration_text(result.seconds)}, {rate:.2f} GB/s of source")
        for role, figures in result.errors_by_role.items():
            click.echo(
                f"error       {role}: relative MSE {figures.relative_mse:.5f}, largest {figures.max_error:.4g},"
                f" clipped {figures.clipped_share:.2%}"
            )
    if result.root_digest is not None:
        click.echo(f"signed      root digest {result.root_digest}")
    click.echo(f"next        {next_step}")
