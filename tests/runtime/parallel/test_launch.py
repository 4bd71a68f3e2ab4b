"""Which rank a process is, from torchrun's environment; anything half or odd is refused."""

from __future__ import annotations

import pytest
from refusals import refusal

from memopt.errors import UsageError
from memopt.runtime.parallel.communicator import SingleRank
from memopt.runtime.parallel.launch import RankEnvironment, communicator_from_environment, rank_environment

TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_torchruns_environment_is_read() -> None:
    assert rank_environment(TORCHRUN) == RankEnvironment(rank=3, num_ranks=8, local_rank=1)
    assert rank_environment({}) is None
    # Set by others too, so it says nothing alone.
    assert rank_environment({"MASTER_PORT": "1", "MASTER_ADDR": "a"}) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "8"), ("RANK", "-1"), ("RANK", "a"), ("RANK", "1.0"), ("RANK", " 1"), ("RANK", "\u0663"), ("RANK", ""),
        ("WORLD_SIZE", "0"), ("WORLD_SIZE", "3"), ("WORLD_SIZE", "99999999999"), ("WORLD_SIZE", "5000"),
        ("LOCAL_RANK", "8"), ("MASTER_PORT", "0"), ("MASTER_PORT", "65536"), ("MASTER_ADDR", ""),
    ],
)  # fmt: skip
def test_nonsense_is_refused_by_name(name: str, value: str) -> None:
    with refusal(UsageError, name):
        rank_environment(TORCHRUN | {name: value})


@pytest.mark.parametrize("name", list(TORCHRUN))
def test_half_an_environment_is_refused(name: str) -> None:
    environ = {other: value for other, value in TORCHRUN.items() if other != name}
    with refusal(UsageError, name):
        rank_environment(environ)


def test_a_process_alone_needs_no_group() -> None:
    alone = TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    for environ in ({}, alone):
        assert isinstance(communicator_from_environment(1, "cpu", environ), SingleRank)


@pytest.mark.parametrize(
    ("tensor_parallel", "environ", "words"),
    [
        (2, {}, ("torchrun did not start", "--nproc-per-node 2")),
        (2, TORCHRUN, ("torchrun started 8", "--nproc-per-node 2")),
        (1, TORCHRUN, ("torchrun started 8",)),
        (0, {}, ("tensor_parallel is 0",)),
        (5000, {}, ("tensor_parallel is 5000",)),
    ],
)
def test_another_number_of_ranks_is_refused(
    tensor_parallel: int, environ: dict[str, str], words: tuple[str, ...]
) -> None:
    with refusal(UsageError, *words):
        communicator_from_environment(tensor_parallel, "cpu", environ)
