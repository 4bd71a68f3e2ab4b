"""Calling `memopt`: in this process for speed, or as the real command."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import sysconfig
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from memopt.cli.main import main

MEMOPT = Path(sysconfig.get_path("scripts")) / "memopt"


@dataclass(frozen=True)
class Outcome:
    """How a call ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def verdict(self) -> dict[str, Any]:
        """The one JSON object on standard output; fails if there is anything else."""
        lines = self.stdout.splitlines()
        assert len(lines) == 1, self.stdout
        return json.loads(lines[0])

    @property
    def refusal(self) -> str:
        """The one line on standard error that is not progress; fails if there are several, or a traceback."""
        lines = [line for line in self.stderr.splitlines() if " done: " not in line]
        assert len(lines) == 1, self.stderr
        assert lines[0].startswith("memopt"), lines[0]
        return lines[0]


def invoke(*arguments: str | Path) -> Outcome:
    """`memopt ARGUMENTS` through its entry point, in this process."""
    stdout, stderr = io.StringIO(), io.StringIO()
    code: Any = 0
    with (
        mock.patch.object(sys, "argv", ["memopt", *map(str, arguments)]),
        redirect_stdout(stdout),
        redirect_stderr(stderr),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    return Outcome(int(code), stdout.getvalue(), stderr.getvalue())


def command(*arguments: str | Path) -> list[str]:
    """The real command's argument vector."""
    return [str(MEMOPT), *map(str, arguments)]


def run_command(*arguments: str | Path, **options: Any) -> Outcome:
    """The real command, to its end; `options` as for subprocess.run."""
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=120, check=False, **options)
    return Outcome(done.returncode, done.stdout, done.stderr)
