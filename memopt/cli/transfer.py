"""How far a transfer is, on standard error: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import click

from memopt.cli.output import one_line, size_text

PLAIN_INTERVAL_SECONDS = 10.0
# (what is done, the file, bytes done of all files, bytes of all files)
TransferDisplay = Callable[[str, str, int, int], None]


@contextmanager
def transfer_display(*, quiet: bool) -> Iterator[TransferDisplay]:
    """A callback to be told how far a transfer is. `quiet`: lines even on a terminal."""
    if quiet or not sys.stderr.isatty():
        yield _plain_display()
        return
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from memopt.cli.tables import make_console

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=make_console(stderr=True)) as bar:
        task = bar.add_task("verifying", total=None)

        def show(stage: str, file: str, done: int, total: int) -> None:
            bar.update(task, total=total, completed=done, description=escape(one_line(f"{stage} {file}")))

        yield show


def _plain_display() -> TransferDisplay:
    last = 0.0

    def say(stage: str, file: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < PLAIN_INTERVAL_SECONDS and done != total:
            return
        last = now
        # The work goes on when the log's reader went away (`2>&1 | head`).
        with suppress(BrokenPipeError):
            click.echo(f"{stage} done: {size_text(done)} of {size_text(total)}: {one_line(file)}", err=True)

    return say
