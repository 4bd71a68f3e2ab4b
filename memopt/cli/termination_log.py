"""Kubernetes' termination message: why a container ended, where `kubectl describe pod` shows it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from memopt.errors import MemoptError
from memopt.manifests.verdict_json import short_json

DEFAULT_PATH = "/dev/termination-log"

termination_log_option = click.option(
    "--termination-log",
    metavar="FILE",
    default=None,
    help=f"Where a short verdict (at most 4096 bytes) also goes (default: {DEFAULT_PATH}, if there is one).",
)


@contextmanager
def termination_message(command: str, path: str | None) -> Iterator[dict[str, Any]]:
    """Yield an empty table; what the block puts into it, or the MemoptError that it raises, is written to `path`.

    Without `path` the default is used if it exists. A message that cannot be written changes nothing but a line on
    standard error.
    """
    message: dict[str, Any] = {}
    try:
        yield message
    except MemoptError as error:
        message = {
            "schema": "memopt.verdict/1",
            "command": command,
            "status": "refused",
            "exit_code": int(error.exit_code),
            "code": error.code,
            "message": error.message,
            "remedy": error.remedy,
            "file": error.file,
        }
        raise
    finally:
        if message:
            _write(path, short_json(message))


def _write(path: str | None, line: bytes) -> None:
    flags = os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        if path is None:
            # Only where Kubernetes mounted it: nothing is created under /dev.
            if not stat.S_ISREG(os.stat(DEFAULT_PATH).st_mode):
                return
            descriptor = os.open(DEFAULT_PATH, flags | os.O_NOFOLLOW)
        else:
            descriptor = os.open(path, flags | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        if path is not None:
            click.echo(f"memopt: cannot write {path}: its folder does not exist", err=True)
    except OSError as problem:
        click.echo(f"memopt: cannot write {path or DEFAULT_PATH}: {problem.strerror}", err=True)
