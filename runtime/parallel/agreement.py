"""All ranks or none: what one of them is refused, all of them are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from memopt.errors import ContentError, MemoptError
from memopt.runtime.parallel.communicator import Communicator

# A rank's refusal, padded to a fixed size, which ranks without one send too. Four texts; a character takes up to twelve
# bytes, as an escaped pair of surrogates.
_REPORT_BYTES = 2**16
_MAX_TEXT_CHARACTERS = 1000

_Result = TypeVar("_Result")


def all_ranks_or_none(communicator: Communicator, work: Callable[[], _Result]) -> _Result:
    """This rank's result of `work`, once every rank has one.

    Raises on every rank when `work` raised on any: a rank its own error, others that of the lowest rank that failed, of
    the same class (so with the same code and exit code), its message naming that rank. `work` must not talk to other
    ranks. A rank that is done waits for the others as long as the communicator's time limit says.
    """
    problem: Exception | None = None
    result: _Result | None = None
    try:
        result = work()
    except Exception as failure:  # noqa: BLE001 - every rank must hear of it, whatever it is; raised again below
        problem = failure
    failed = communicator.maximum(torch.tensor([0 if problem is None else 1], dtype=torch.int32))
    if int(failed[0]):
        reports = communicator.gather_columns(_report(problem))
        if problem is not None:
            raise problem
        raise _first_problem(reports.view(-1, _REPORT_BYTES))
    return result  # type: ignore[return-value]


def require_equal(communicator: Communicator, what: str, value: bytes, error: type[MemoptError] = ContentError) -> None:
    """`error` on all ranks unless every rank has the same `value`, of any length."""
    mine = torch.frombuffer(bytearray(hashlib.sha256(value).digest()), dtype=torch.uint8)
    first = communicator.from_first(mine.clone())
    differs = torch.tensor([0 if torch.equal(first, mine) else communicator.rank], dtype=torch.int32)
    rank = int(communicator.maximum(differs)[0])
    if rank:
        raise error(
            f"{what} of rank {rank} is another than rank 0's", remedy="give all ranks the same release and options"
        )


def _report(problem: Exception | None) -> torch.Tensor:
    """uint8 [1, _REPORT_BYTES]: the refusal as JSON, padded with zeros; zeros alone without one."""
    report = torch.zeros((1, _REPORT_BYTES), dtype=torch.uint8)
    if problem is not None:
        if not isinstance(problem, MemoptError):
            problem = MemoptError(f"{type(problem).__name__}: {problem}")
        fields = {name: getattr(problem, name) for name in ("message", "remedy", "tensor", "file")}
        short = {name: None if text is None else text[:_MAX_TEXT_CHARACTERS] for name, text in fields.items()}
        raw = json.dumps({"code": problem.code, **short}).encode()
        report[0, : len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return report


def _first_problem(reports: torch.Tensor) -> MemoptError:
    """The error of the lowest rank that reported one. `reports` uint8 [ranks, _REPORT_BYTES]."""
    rank = int((reports[:, 0] != 0).to(torch.uint8).argmax())
    fields: dict[str, Any] = json.loads(bytes(reports[rank].numpy()).rstrip(b"\0"))
    code = fields.pop("code")
    # The first is the public one: private refinements may share its code.
    kind = next((kind for kind in _all_kinds(MemoptError) if kind.code == code), MemoptError)
    return kind(f"rank {rank}: {fields.pop('message')}", **fields)


def _all_kinds(kind: type[MemoptError]) -> Iterator[type[MemoptError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _all_kinds(below)
