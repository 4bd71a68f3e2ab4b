"""What rank 0 tells the others before a step: requests to add, requests to end. Bytes on the wire are JSON.

All ranks make the same calls, but a caller's wish to abort comes at another moment on each: rank 0's counts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

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
    """Rank 0's commands, on every rank; all ranks call it before each step."""
    if communicator.num_ranks == 1:
        return list(commands)
    return parse_commands(communicator.bytes_from_first(render_commands(commands)))


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
