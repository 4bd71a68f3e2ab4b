"""Runs lm-eval (EleutherAI lm-evaluation-harness) against an OpenAI-compatible endpoint, in a process of its own.

lm-eval is the optional extra "tasks". Its command line: docs/interface.md; its API models: docs/API_guide.md.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from memopt.compressor.evaluate.task_scores import read_results
from memopt.errors import NetworkError, UnsupportedError, UsageError

Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]
# What of lm-eval's own words is repeated when it fails.
MAX_WORDS = 600


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server of one model. `url`: of its completions ("http://host:8000/v1/completions"); `model`: its name there.

    `tokenizer`: a folder whose tokenizer lm-eval counts tokens with.
    """

    url: str
    model: str
    tokenizer: Path


def check_tasks(endpoint: Endpoint, tasks: Sequence[str], *, is_installed: bool | None = None) -> None:
    """UsageError for no task, or for names and an address that lm-eval cannot be given; UnsupportedError without it.

    `is_installed`: whether lm-eval is (None: looked up).
    """
    if not tasks or not all(task and not task.startswith("-") and "," not in task for task in tasks):
        raise UsageError(f"tasks {list(tasks)}", remedy="name lm-eval's tasks, such as gsm8k")
    parts = urlsplit(endpoint.url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(f"{endpoint.url!r} is no address of completions", remedy="http://host:8000/v1/completions")
    for text in (endpoint.url, endpoint.model, str(endpoint.tokenizer)):
        # lm-eval splits its model arguments at commas.
        if "," in text:
            raise UsageError(f"{text!r} holds a comma, which lm-eval cannot be given", remedy="use a name without one")
    if not (importlib.util.find_spec("lm_eval") is not None if is_installed is None else is_installed):
        raise UnsupportedError("lm-eval is not installed", remedy="pip install 'memopt[tasks]'")


def run_tasks(
    endpoint: Endpoint, tasks: Sequence[str], *, limit: int | None = None, seed: int = 0, run: Run | None = None
) -> Mapping[str, Any]:
    """lm-eval's results table for `tasks`; `limit`: samples of each task.

    Raises as `check_tasks`; NetworkError with lm-eval's last words when it fails, DataFileError for results that are
    none. `run`: what runs its command, instead of lm-eval itself.
    """
    check_tasks(endpoint, tasks, is_installed=None if run is None else True)
    run = run or _run
    with tempfile.TemporaryDirectory() as folder:
        arguments = (
            f"model={endpoint.model},base_url={endpoint.url},tokenizer={endpoint.tokenizer},tokenized_requests=False"
        )
        command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments]
        command += ["--tasks", ",".join(tasks), "--output_path", folder, "--seed", str(seed)]
        command += [] if limit is None else ["--limit", str(limit)]
        finished = run(command)
        if finished.returncode:
            words = " ".join((finished.stderr or finished.stdout).split())[-MAX_WORDS:]
            raise NetworkError(f"lm-eval ended with code {finished.returncode}: {words}", remedy="check the endpoint")
        found = sorted(Path(folder).rglob("results_*.json"))
        if len(found) != 1:
            raise UnsupportedError(f"lm-eval wrote {len(found)} results files", remedy="use lm-eval 0.4.5 or later")
        return read_results(found[0])


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """The command, to its end, however long a benchmark takes."""
    return subprocess.run(command, capture_output=True, text=True, check=False)
