"""What the commands share on a terminal: sizes in words, JSON verdicts, and one clear line for every refusal."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import click

from memopt.errors import ExitCode, InterruptedRunError, MemoptError, MemoptIOError

TRUST_COMMANDS = {"verify", "exec", "sign", "push", "pull"}
VERDICT_SCHEMA = "memopt.verdict/1"
SIGTERM_EXIT = 128 + signal.SIGTERM


def size_text(size_bytes: int) -> str:
    """A size in both units: "419.9 GiB (450.9 GB)", or bytes when it is small."""
    for power, binary, decimal in ((3, "GiB", "GB"), (2, "MiB", "MB")):
        if size_bytes >= 1024**power:
            return f"{size_bytes / 1024**power:,.1f} {binary} ({size_bytes / 1000**power:,.1f} {decimal})"
    return f"{size_bytes:,} B"


def duration_text(seconds: float) -> str:
    """A duration for people: "41 s", "3 min 20 s", "2 h 05 min"."""
    whole = round(seconds)
    if whole < 1:
        return f"{seconds:.2f} s"
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def print_verdict(command: str, fields: dict[str, Any], *, exit_code: int = 0) -> None:
    """The machine-readable verdict of a command that did its work, on standard output; `exit_code` is its own."""
    status = "ok" if exit_code == ExitCode.OK else "refused"
    click.echo(
        json.dumps({"schema": VERDICT_SCHEMA, "command": command, "status": status, "exit_code": exit_code, **fields})
    )


def one_line(text: str) -> str:
    """`text` without line breaks and without control characters, which a hostile tensor name may hold."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))


def refuse(command: str, error: MemoptError, *, as_json: bool, exit_code: int) -> NoReturn:
    """End with one line on standard error, and a verdict on standard output if it is asked for."""
    if as_json:
        verdict = {
            "schema": VERDICT_SCHEMA,
            "command": command,
            "status": "refused",
            "exit_code": exit_code,
            "code": error.code,
            "message": error.message,
            "remedy": error.remedy,
            "tensor": error.tensor,
            "file": error.file,
        }
        echo_quietly(json.dumps(verdict))
    echo_quietly(f"{f'memopt {command}'.strip()}: {error.code}: {one_line(str(error))}", err=True)
    sys.exit(exit_code)


def echo_quietly(text: str, *, err: bool = False) -> None:
    """Print a line; a reader that went away (`| head`) changes nothing, least of all the exit code of a refusal."""
    stream = sys.stderr if err else sys.stdout
    try:
        click.echo(text, err=err)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def refusals(command: str, *, as_json: bool) -> Iterator[None]:
    """Turn every MemoptError into one line (and a JSON verdict) with its exit code; SIGTERM acts like Ctrl-C."""
    terminated: list[int] = []

    def on_terminate(number: int, _: object) -> NoReturn:
        terminated.append(number)
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, on_terminate)
    try:
        yield
        sys.stdout.flush()
    except MemoptError as error:
        code = SIGTERM_EXIT if terminated and error.exit_code == ExitCode.INTERRUPTED else int(error.exit_code)
        refuse(command, error, as_json=as_json, exit_code=code)
    except KeyboardInterrupt:
        # What was done so far is known only below: a stage that keeps something says so in an error of its own.
        stopped = InterruptedRunError("stopped before it was done", remedy="run the same command again")
        code = SIGTERM_EXIT if terminated else int(ExitCode.INTERRUPTED)
        refuse(command, stopped, as_json=as_json, exit_code=code)
    except BrokenPipeError:
        # The reader of our output went away (`| head`): nothing to say, and nobody to say it to.
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        # Success must have been said to count where trust is decided: a pipe that closed is none.
        sys.exit(int(ExitCode.IO if command in TRUST_COMMANDS else ExitCode.OK))
    except OSError as problem:
        failed = MemoptIOError(problem.strerror or str(problem), file=str(problem.filename or "") or None)
        refuse(command, failed, as_json=as_json, exit_code=int(failed.exit_code))
    finally:
        signal.signal(signal.SIGTERM, previous)


def parse_size(text: str) -> int:
    """Bytes from "4GB", "4GiB", "500MB" or a plain number; click.BadParameter otherwise."""
    units: dict[str, int] = {"": 1, "B": 1}
    for power, letter in enumerate("KMGT", start=1):
        units |= {f"{letter}B": 1000**power, f"{letter}IB": 1024**power}
    number = text.strip().rstrip("BbKkMmGgTtIi").strip()
    unit = text.strip()[len(number) :].strip().upper()
    try:
        return int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        raise click.BadParameter(f"{text!r} is not a size like 4GB or 500MiB") from None
