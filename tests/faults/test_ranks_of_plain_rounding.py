"""torchrun with a recipe that needs no data: units are shared between ranks, and the bytes are those of one process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rank_processes import Refusal, run_ranks

import memopt
from faults.small_source import RANK_OPTIONS, make_small_source
from faults.trees import tree
from memopt.errors import OutputError, PeerError


def make_release(source: Path, out: Path) -> int:
    return memopt.compress(source, out, options=RANK_OPTIONS, device="cpu").num_units


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_rank_files_and_ledger_are_those_of_one_process(tmp_path: Path, num_ranks: int) -> None:
    source = make_small_source(tmp_path / "source")
    make_release(source, tmp_path / "alone")
    run_ranks(num_ranks, make_release, source, tmp_path / "out")
    assert tree(tmp_path / "out") == tree(tmp_path / "alone")


def test_a_refusal_of_rank_0_ends_the_others(tmp_path: Path) -> None:
    source = make_small_source(tmp_path / "source")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("not empty")
    results = run_ranks(2, make_release, source, tmp_path / "out")
    assert all(isinstance(result, Refusal) for result in results)
    assert [result.kind for result in results] == [OutputError, PeerError]


def make_release_of_own_folder(source: Path, outs: Path) -> int:
    """As on machines that do not share the file system."""
    return make_release(source, outs / os.environ["RANK"])


def test_ranks_that_do_not_see_one_folder_are_told(tmp_path: Path) -> None:
    source = make_small_source(tmp_path / "source")
    first, second = run_ranks(2, make_release_of_own_folder, source, tmp_path)
    assert (first.kind, second.kind) == (PeerError, OutputError)
    assert "rank 1 does not see what rank 0 writes" in second.text
    assert not (tmp_path / "1").exists()
