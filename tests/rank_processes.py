"""Ranks of a tensor-parallel group as processes of their own, which find each other as under torchrun."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from memopt.errors import MemoptError

# One import of torch for all ranks of a test process.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "torch",
        "memopt.runtime.engine.engine",
        "memopt.runtime.parallel.distributed",
        "memopt.compressor.api",
        "memopt.compressor.calibrate.calibrate_model",
    ]
)


@dataclass(frozen=True)
class Refusal:
    """A MemoptError that a rank ended with."""

    kind: type[MemoptError]
    text: str
    exit_code: int


@dataclass
class Ranks:
    """Running ranks."""

    processes: list[Any]
    results: list[Connection]

    def result(self, rank: int, timeout_seconds: float = 60) -> Any:
        """What a rank's work returned, or the Refusal that it ended with; None if it died."""
        try:
            if not self.results[rank].poll(timeout_seconds):
                raise AssertionError(f"rank {rank} still runs after {timeout_seconds} s")
            found = self.results[rank].recv()
        except EOFError:
            return None
        if isinstance(found, str):
            raise AssertionError(f"rank {rank}:\n{found}")
        return found[0]


@contextmanager
def started_ranks(num_ranks: int, work: Callable[..., Any], *arguments: Any) -> Iterator[Ranks]:
    """`work(*arguments)` on every rank, under torchrun's environment; what still runs at the end is killed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes, results = [], []
    for rank in range(num_ranks):
        reader, writer = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(
            target=_run, args=(rank, num_ranks, port, writer, work, arguments), daemon=True, name=f"rank {rank}"
        )
        process.start()
        writer.close()
        processes.append(process)
        results.append(reader)
    try:
        yield Ranks(processes, results)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def run_ranks(num_ranks: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Every rank's result of `work(*arguments)`, a Refusal where it raised a MemoptError."""
    with started_ranks(num_ranks, work, *arguments) as ranks:
        return [ranks.result(rank) for rank in range(num_ranks)]


def _run(rank: int, num_ranks: int, port: int, writer: Connection, work: Any, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    try:
        writer.send((work(*arguments),))
    except MemoptError as problem:
        writer.send((Refusal(type(problem), str(problem), int(problem.exit_code)),))
    except BaseException:  # noqa: BLE001 - the test that waits for the result must hear of it
        writer.send(traceback.format_exc())
    writer.close()
