"""What ranks say to one another over gloo: the same bits everywhere, and no rank that hangs when another is lost."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import Refusal, run_ranks, started_ranks
from refusals import within_seconds

from memopt.errors import ContentError, MemoptError, PeerError, SignatureError, UsageError
from memopt.runtime.parallel import distributed
from memopt.runtime.parallel.agreement import all_ranks_or_none, require_equal
from memopt.runtime.parallel.communicator import Communicator, SingleRank
from memopt.runtime.parallel.distributed import DistributedCommunicator
from memopt.runtime.parallel.launch import communicator_from_environment

# The first number at which an order of addition that depends on the place shows.
NUM_RANKS = 3
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def values_of(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def say_everything() -> dict[str, Any]:
    """Every method once; run by each rank."""
    communicator = communicator_from_environment(NUM_RANKS, timeout_seconds=30)
    rank = communicator.rank
    found: dict[str, Any] = {"rank": (rank, communicator.num_ranks)}
    for dtype in DTYPES:
        found[f"sum {dtype}"] = communicator.sum(values_of(rank, 16, 40, dtype=dtype)).double().numpy()
    rows = values_of(rank, 16, 300)
    found["sum of a row"] = communicator.sum(rows[5:6].clone()).numpy()
    found["sum of rows"] = communicator.sum(rows.clone())[5:6].numpy()
    distributed.SUM_SLICE_ELEMENTS = 77
    found["sum in slices"] = communicator.sum(rows.clone())[5:6].numpy()
    strided = values_of(rank, 8, 6).t()
    found["sum of a view"] = communicator.sum(strided).numpy()
    found["sum is in place"] = bool((strided == torch.from_numpy(found["sum of a view"])).all())
    flags = torch.tensor([rank == 1, rank == 2, 0, 7 * rank], dtype=torch.int32)
    found["maximum"] = communicator.maximum(flags).tolist()
    found["columns"] = communicator.gather_columns(torch.full((2, 3), rank, dtype=torch.bfloat16)).float().tolist()
    found["first"] = communicator.from_first(torch.full((3, 2), rank, dtype=torch.int64).t()).tolist()
    found["first bool"] = communicator.from_first(torch.tensor([rank == 0, False])).tolist()
    found["nothing"] = [
        tuple(communicator.sum(torch.empty(0, 4)).shape),
        tuple(communicator.gather_columns(torch.empty(0, 4)).shape),
        tuple(communicator.from_first(torch.empty(0)).shape),
    ]
    for length in (0, 1, 1015, 1016, 1017, 100_000):
        message = os.urandom(length) if rank else bytes(number % 251 for number in range(length))
        found[f"bytes {length}"] = communicator.bytes_from_first(message)
    distributed.MAX_MESSAGE_BYTES = 2000
    try:
        communicator.bytes_from_first(bytes(2001))
    except UsageError as problem:
        found["too long"] = str(problem)
    try:
        communicator_from_environment(NUM_RANKS)
    except UsageError as problem:
        found["twice"] = str(problem)
    try:
        communicator.maximum(torch.zeros(1))
    except UsageError as problem:
        found["maximum of floats"] = str(problem)
    found |= agree(communicator)
    communicator.close()  # type: ignore[attr-defined]
    try:
        communicator.sum(torch.zeros(1))
    except PeerError as problem:
        found["closed"] = str(problem)
    return found


def agree(communicator: Communicator) -> dict[str, Any]:
    """Ranks that are refused something; run by each rank."""
    rank = communicator.rank
    found: dict[str, Any] = {"agreed": all_ranks_or_none(communicator, lambda: rank * 10)}

    def refused_on(*ranks: int, problem: Exception) -> Any:
        def work() -> None:
            if rank in ranks:
                raise problem

        try:
            return all_ranks_or_none(communicator, work)
        except (MemoptError, ZeroDivisionError) as heard:
            return type(heard), str(heard), getattr(heard, "file", None)

    found["one refused"] = refused_on(2, problem=SignatureError("no ä key", remedy="sign", file="f.sig"))
    found["two refused"] = refused_on(1, 2, problem=ContentError(f"flipped on {rank}", tensor="t", file="w"))
    found["a bug"] = refused_on(1, problem=ZeroDivisionError("oops"))
    # Twelve bytes a character as JSON: no text takes more.
    long_text = "\U0001f600" * 10_000
    found["long"] = refused_on(0, problem=ContentError(long_text, remedy=long_text, tensor=long_text, file=long_text))
    require_equal(communicator, "the release", b"same")
    try:
        require_equal(communicator, "the release", b"same" if rank < 2 else b"other")
    except ContentError as problem:
        found["differs"] = str(problem)
    return found


@pytest.fixture(scope="module")
def said() -> list[dict[str, Any]]:
    return run_ranks(NUM_RANKS, say_everything)


def test_every_rank_knows_its_number(said: list[dict[str, Any]]) -> None:
    assert [found["rank"] for found in said] == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_the_same_bits_on_all_ranks_and_rounded_once(said: list[dict[str, Any]], dtype: torch.dtype) -> None:
    parts = [values_of(rank, 16, 40, dtype=dtype) for rank in range(NUM_RANKS)]
    wide = [part.float() if dtype.itemsize == 2 else part for part in parts]
    expected = (wide[0] + wide[1] + wide[2]).to(dtype).double().numpy()
    for found in said:
        assert (found[f"sum {dtype}"] == expected).all()


def test_a_rows_sum_does_not_depend_on_what_else_is_summed(said: list[dict[str, Any]]) -> None:
    for found in said:
        assert (found["sum of a row"] == found["sum of rows"]).all()
        assert (found["sum of a row"] == found["sum in slices"]).all()
        assert (found["sum of a row"] == said[0]["sum of a row"]).all()


def test_gathering_and_comparing(said: list[dict[str, Any]]) -> None:
    summed = sum(values_of(rank, 8, 6).t() for rank in range(NUM_RANKS))
    for found in said:
        assert torch.equal(torch.from_numpy(found["sum of a view"]), summed)
        assert found["sum is in place"]
        assert found["maximum"] == [1, 1, 0, 14]
        assert found["columns"] == [[0.0] * 3 + [1.0] * 3 + [2.0] * 3] * 2
        assert found["first"] == [[0, 0, 0]] * 2
        assert found["first bool"] == [True, False]
        assert found["nothing"] == [(0, 4), (0, 12), (0,)]


def test_messages_of_any_length_arrive(said: list[dict[str, Any]]) -> None:
    for found in said:
        for length in (0, 1, 1015, 1016, 1017, 100_000):
            assert found[f"bytes {length}"] == bytes(number % 251 for number in range(length))
        assert "more than 2,000 bytes" in found["too long"]
        assert "process group already" in found["twice"]
        assert "float32" in found["maximum of floats"]
        assert "closed" in found["closed"]


def test_all_ranks_or_none(said: list[dict[str, Any]]) -> None:
    assert [found["agreed"] for found in said] == [0, 10, 20]
    for rank, found in enumerate(said):
        prefix = "" if rank == 2 else "rank 2: "
        assert found["one refused"] == (SignatureError, f"f.sig: {prefix}no ä key (sign)", "f.sig")
        # A rank that failed itself tells its own story, the others that of the first.
        expected = f"w: t: flipped on {rank}" if rank else "w: t: rank 1: flipped on 1"
        assert found["two refused"] == (ContentError, expected, "w")
        kind = ZeroDivisionError if rank == 1 else MemoptError
        assert found["a bug"][0] is kind
        assert "oops" in found["a bug"][1]
        assert found["long"][0] is ContentError
        assert found["differs"].startswith("the release of rank 2 is another")


def test_one_rank_alone_agrees_with_itself() -> None:
    assert all_ranks_or_none(SingleRank(), lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        all_ranks_or_none(SingleRank(), lambda: 1 // 0)
    require_equal(SingleRank(), "x", b"y")


def wait_for_the_other(silence_seconds: float, met: Path) -> list[str]:
    """Rank 1 says nothing after the first word, when there is a file `met`; what rank 0 hears, twice."""
    communicator = communicator_from_environment(2, timeout_seconds=silence_seconds)
    communicator.sum(torch.ones(1))
    if communicator.rank == 1:
        met.touch()
        time.sleep(600)
    heard = []
    for _ in range(2):
        try:
            communicator.sum(torch.ones(1))
        except PeerError as problem:
            heard.append(str(problem))
    return heard


def test_a_rank_that_dies_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    met = tmp_path / "met"
    with within_seconds(60), started_ranks(2, wait_for_the_other, 60.0, met) as ranks:
        while not met.exists():
            time.sleep(0.01)
        started = time.monotonic()
        os.kill(ranks.processes[1].pid, signal.SIGKILL)
        heard = ranks.result(0, 30)
        assert time.monotonic() - started < 20
        assert ranks.result(1) is None
    assert len(heard) == 2
    assert "another rank ended or is silent" in heard[0]


def test_a_rank_that_is_silent_is_left_in_time(tmp_path: Path) -> None:
    with started_ranks(2, wait_for_the_other, 2.0, tmp_path / "met") as ranks:
        heard = ranks.result(0, 40)
    assert "rank 0 of 2" in heard[0]
    assert "cannot go on" in heard[1]


def come_alone(silence_seconds: float, start_seconds: float) -> None:
    """Rank 1 never comes."""
    if os.environ["RANK"] == "1":
        time.sleep(600)
    DistributedCommunicator(0, 2, timeout_seconds=silence_seconds, start_timeout_seconds=start_seconds)


@pytest.mark.parametrize(("silence_seconds", "start_seconds"), [(1.0, 600.0), (7 * 24 * 3600.0, 1.0)])
def test_a_rank_that_never_comes_is_left_in_time(silence_seconds: float, start_seconds: float) -> None:
    """Ranks of a run of days may work in silence for days, but they start together."""
    with started_ranks(2, come_alone, silence_seconds, start_seconds) as ranks:
        found = ranks.result(0, 40)
    assert isinstance(found, Refusal)
    assert found.kind is PeerError
    assert "waiting for the other ranks to start" in found.text
