"""One hostile input, and running it through the command, the API and the loader: all must say the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from cli.invoke import Outcome, invoke
from refusals import within_seconds
from release_files import policy_json

from memopt.errors import MemoptError
from memopt.manifests.policy import load_policy
from memopt.manifests.release import open_release
from memopt.manifests.verify import VerifyOptions, verify_release


@dataclass(frozen=True)
class Case:
    """A row of the table of hostile inputs (docs/threat-model.md): what is done to a release, what must come out.

    `make` changes the folder, and may return another path to use in its place. `words` must be in the command's
    standard error, or with code 0 in its standard output. `policy`: trust.json. `clock`: seconds since 1970 (None:
    now). `is_big`: the release has shards of three chunks. `around`: what is patched while it runs.
    """

    row: int
    name: str
    code: int
    make: Callable[[Path], Path | None]
    words: tuple[str, ...] = ()
    policy: Callable[[Path], str] = lambda _folder: policy_json()
    strict: bool = False
    rank: int | None = None
    clock: int | None = None
    is_big: bool = False
    allow_linked_root: bool = False
    around: Callable[[], Any] = nullcontext

    def __str__(self) -> str:
        return f"row {self.row}: {self.name}"


@dataclass(frozen=True)
class Outcomes:
    """How the three ways ended."""

    command: Outcome
    verify_code: int
    loader_code: int
    loader_error: MemoptError | None

    @property
    def codes(self) -> dict[str, int]:
        return {"memopt verify": self.command.code, "verify_release": self.verify_code, "load": self.loader_code}


def _command(case: Case, folder: Path, policy: Path) -> Outcome:
    arguments: list[str | Path] = ["verify", folder, "--policy", policy]
    arguments += ["--strict"] * case.strict + ["--allow-linked-root"] * case.allow_linked_root
    arguments += [] if case.rank is None else ["--rank", str(case.rank)]
    return invoke(*arguments)


def _verify(case: Case, folder: Path, policy: Path) -> int:
    ranks = None if case.rank is None else (case.rank,)
    options = VerifyOptions(ranks=ranks, strict=case.strict, allow_linked_root=case.allow_linked_root)
    try:
        return verify_release(folder, load_policy(policy), options).exit_code
    except MemoptError as problem:
        # A policy that cannot be read, or a wrong call.
        return int(problem.exit_code)


def _load(case: Case, folder: Path, policy: Path) -> MemoptError | None:
    """The error that kept the loader from returning a tensor."""
    try:
        with open_release(
            folder, policy=policy, strict=case.strict, allow_linked_root=case.allow_linked_root
        ) as release:
            tensors = release.load(rank=case.rank)
    except MemoptError as problem:
        return problem
    assert tensors
    return None


def run_everywhere(case: Case, folder: Path, policy: Path) -> Outcomes:
    """Verify and load what the case made of a release."""
    with _clock(case.clock), case.around(), within_seconds(30):
        command = _command(case, folder, policy)
        code = _verify(case, folder, policy)
        error = _load(case, folder, policy)
    return Outcomes(command, code, 0 if error is None else int(error.exit_code), error)


@contextmanager
def _clock(seconds: int | None) -> Iterator[None]:
    with nullcontext() if seconds is None else mock.patch("time.time", return_value=float(seconds)):
        yield
