"""Runs lm-eval (EleutherAI lm-evaluation-harness) against an OpenAI-compatible endpoint, in a process of its own.

lm-eval is the optional extra "tasks", 0.4.13 or later. Its command line: docs/interface.md; its API models:
docs/API_guide.md and lm_eval/models/api_models.py.
"""

from __future__ import annotations

import importlib.util
import json
import re
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
# The last line of a Python traceback: an exception's name, a colon, its words.
_EXCEPTION = re.compile(r"^[\w.]+: .+$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server of one model. `url`: of its completions ("http://host:8000/v1/completions"); `model`: its name there.

    `tokenizer`: a folder whose tokenizer makes the token ids that the server is sent. `max_tokens`: the model's longest
    sequence; lm-eval cuts what is longer on the left (by itself at 2,048 tokens).
    """

    url: str
    model: str
    tokenizer: Path
    max_tokens: int

    @property
    def model_args(self) -> str:
        """lm-eval's --model_args, as JSON: its key=value form takes a model's name "7" for a number.

        The server is sent token ids: it would put its own special tokens before a text, of which lm-eval, which sums
        logprobs behind a prompt that it counted itself, knows nothing. A tokenizer of the server is not asked for.
        """
        return json.dumps(
            {
                "model": self.model,
                "base_url": self.url,
                "tokenizer": str(self.tokenizer),
                "tokenizer_backend": "huggingface",
                "tokenized_requests": True,
                "max_length": self.max_tokens,
            }
        )


def check_tasks(endpoint: Endpoint, tasks: Sequence[str], *, is_installed: bool | None = None) -> None:
    """UsageError for no task, or for a name or an address that lm-eval cannot be given; UnsupportedError without it.

    `is_installed`: whether lm-eval and its tokenizers are (None: looked up).
    """
    if not tasks or not all(task and not task.startswith("-") and "," not in task for task in tasks):
        raise UsageError(f"tasks {list(tasks)}", remedy="name lm-eval's tasks, such as gsm8k")
    parts = urlsplit(endpoint.url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(f"{endpoint.url!r} is no address of completions", remedy="http://host:8000/v1/completions")
    if not (_is_installed() if is_installed is None else is_installed):
        raise UnsupportedError(
            "lm-eval, or transformers, whose tokenizers it takes, is not installed",
            remedy="pip install '.[tasks]' in a checkout of memopt",
        )


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
        command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"]
        command += ["--model_args", endpoint.model_args]
        command += ["--tasks", ",".join(tasks), "--output_path", folder, "--seed", str(seed)]
        command += [] if limit is None else ["--limit", str(limit)]
        finished = run(command)
        if finished.returncode:
            words = _last_words(finished.stderr or finished.stdout)
            raise NetworkError(
                f"lm-eval ended with code {finished.returncode}: {words}",
                remedy="check the endpoint and the task's name",
            )
        found = sorted(Path(folder).rglob("results_*.json"))
        if len(found) != 1:
            raise UnsupportedError(f"lm-eval wrote {len(found)} results files", remedy="use lm-eval 0.4.13")
        return read_results(found[0])


def _is_installed() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("lm_eval", "transformers"))


def _last_words(text: str) -> str:
    """What an exception says at a traceback's end; without one, the end of the text."""
    exceptions = _EXCEPTION.findall(text)
    return " ".join((exceptions[-1] if exceptions else text).split())[-MAX_WORDS:]


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """The command, to its end, however long a benchmark takes."""
    return subprocess.run(command, capture_output=True, text=True, check=False)
