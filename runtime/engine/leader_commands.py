"""What rank 0 tells the others before a step: requests to add, requests to end. Bytes on the wire are JSON.

All ranks make the same calls, but a caller's wish to abort comes at another moment on each: rank 0's counts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from memopt.errors import UsageError
from memopt.runtime.engine.sampling_params import SamplingParams
from memopt.runtime.parallel.communicator import Communicator


@dataclass(frozen=True, slots=True)
class Submission:
    """A request in the order of its number, from 0."""

    prompt: tuple[int, ...]
    params: SamplingParams
    tenant: str


@dataclass(frozen=True, slots=True)
class Abortion:
    """The end of a request that was submitted."""

    request_id: int


Command = Submission | Abortion


def exchange(commands: Sequence[Command], communicator: Communicator) -> list[Command]:
    """Rank 0's commands, on every rank; all ranks call it before each step.

    Raises UsageError on a rank that was asked for other requests than rank 0 since the step before: it would take one
    request's answer for another's. The group cannot go on; the other ranks learn of it when this one ends.
    """
    if communicator.num_ranks == 1:
        return list(commands)
    firsts = parse_commands(communicator.bytes_from_first(render_commands(commands)))
    if _submissions(commands) != _submissions(firsts):
        raise UsageError(
            f"rank {communicator.rank} was asked for {len(_submissions(commands))} new requests, which are not the"
            f" {len(_submissions(firsts))} of rank 0",
            remedy="submit the same prompts in the same order on every rank",
        )
    return firsts


def render_commands(commands: Sequence[Command]) -> bytes:
    """A JSON list of objects, one a command."""
    return json.dumps([asdict(command) for command in commands]).encode()


def parse_commands(raw: bytes) -> list[Command]:
    """The commands of `render_commands`; the bytes come from rank 0 of the same program."""
    commands: list[Command] = []
    for fields in json.loads(raw):
        if "request_id" in fields:
            commands.append(Abortion(fields["request_id"]))
        else:
            params = SamplingParams(**{**fields["params"], "stop": tuple(fields["params"]["stop"])})
            commands.append(Submission(tuple(fields["prompt"]), params, fields["tenant"]))
    return commands


def _submissions(commands: Sequence[Command]) -> list[Submission]:
    return [command for command in commands if isinstance(command, Submission)]
