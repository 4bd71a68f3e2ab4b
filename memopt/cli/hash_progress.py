"""A line on standard error now and then while a release is hashed."""

from __future__ import annotations

import time
from contextlib import suppress

import click

from memopt.cli.output import duration_text, one_line, size_text

INTERVAL_SECONDS = 10.0


class HashProgress:
    """Called with bytes hashed, bytes to hash and the file; says nothing in the first seconds."""

    def __init__(self) -> None:
        self._started = self._last = time.monotonic()

    def __call__(self, done_bytes: int, total_bytes: int, file: str) -> None:
        now = time.monotonic()
        if now - self._last < INTERVAL_SECONDS:
            return
        self._last = now
        rate = done_bytes / (now - self._started)
        left = duration_text((total_bytes - done_bytes) / rate) if rate else "?"
        # The work goes on when the log's reader went away (`2>&1 | head`).
        with suppress(BrokenPipeError):
            click.echo(
                f"{size_text(done_bytes)} of {size_text(total_bytes)}, {rate / 1e9:.2f} GB/s, {left} left:"
                f" {one_line(file)}",
                err=True,
            )
