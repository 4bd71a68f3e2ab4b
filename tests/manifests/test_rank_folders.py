"""Names of rank folders, and headers that name another rank than the folder they lie in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import assert_refusal, refusal

from memopt.errors import LayoutError, UsageError
from memopt.manifests.file_roles import known_ranks, needed_files, ranks_of
from memopt.manifests.rank_folders import (
    RankFolder,
    RankLayout,
    chosen_layout,
    parse_layout,
    place_problem,
    rank_folder_of,
)

LAYOUTS = st.builds(RankLayout, st.sampled_from(["tp", "ep"]), st.integers(1, 9999))
FOLDERS = st.builds(RankFolder, LAYOUTS, st.integers(0, 9999))


@given(FOLDERS)
def test_a_folder_is_read_back_from_its_path(folder: RankFolder) -> None:
    path = f"{folder.path}model.safetensors"
    assert rank_folder_of(path) == folder
    assert ranks_of(path) == (folder.rank,)
    assert parse_layout(folder.layout.folder) == folder.layout


@pytest.mark.parametrize(
    "path",
    [
        "model.safetensors",
        "tp8/model.safetensors",
        "tp8/rank-3",
        "tp08/rank-3/x",
        "tp8/rank-03/x",
        "pp8/rank-3/x",
        "tp0/rank-0/x",
        "a/tp8/rank-3/x",
        "tp8/rank-/x",
        "tp8/rank-\u0663/x",
        "tp12345/rank-3/x",
    ],
)
def test_names_that_are_no_rank_folder(path: str) -> None:
    assert rank_folder_of(path) is None
    assert ranks_of(path) is None


@given(FOLDERS, FOLDERS)
def test_a_file_lies_well_in_its_own_folder_alone(folder: RankFolder, other: RankFolder) -> None:
    problem = place_problem(f"{other.path}x.safetensors", {"format": "pt"} | folder.metadata)
    assert (problem is None) == (folder == other)


@pytest.mark.parametrize(
    ("name", "metadata", "words"),
    [
        ("tp8/rank-0/m", {"tensor_parallel": "8", "rank": "3"}, "holds rank 3 of tp8, but lies at rank 0: rank files"),
        ("tp4/rank-3/m", {"tensor_parallel": "8", "rank": "3"}, "holds rank 3 of tp8, but lies at rank 3 of tp4:"),
        ("ep8/rank-3/m", {"tensor_parallel": "8", "rank": "3"}, "holds rank 3 of tp8, but lies at rank 3 of ep8:"),
        ("m", {"expert_parallel": "8", "rank": "3"}, "holds rank 3 of ep8, but lies among the hub files:"),
        ("tp8/rank-3/m", {"tensor_parallel": "8", "rank": "\n" * 999}, r"holds rank '\n\n"),
        ("tp8/rank-3/m", {"tensor_parallel": "8", "rank": "03"}, "holds rank 03 of tp8"),
        ("tp8/rank-3/m", {"tensor_parallel": "8", "expert_parallel": "8", "rank": "3"}, "of tp8 and ep8"),
    ],
)
def test_a_swapped_file_is_named(name: str, metadata: dict[str, str], words: str) -> None:
    problem = place_problem(name, metadata)
    assert problem is not None
    assert_refusal(problem, LayoutError, name, words, "were swapped")


@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}, {"rank": "3"}, {"tensor_parallel": "8"}])
def test_a_header_without_a_rank_lies_well_anywhere(metadata: dict[str, str]) -> None:
    assert place_problem("model.safetensors", metadata) is None
    assert place_problem("tp8/rank-0/model.safetensors", metadata) is None


def test_choosing_a_layout() -> None:
    assert chosen_layout(None, None) is None
    assert chosen_layout(8, None) == "tp8"
    assert chosen_layout(None, 8) == "ep8"
    with refusal(UsageError, "exclude each other"):
        chosen_layout(8, 8)
    for bad in (0, -1, 4097):
        with refusal(UsageError, f"expert_parallel is {bad}"):
            chosen_layout(None, bad)


def test_what_a_rank_needs_of_two_layouts() -> None:
    names = ("config.json", "m.safetensors", "tp4/rank-3/m.safetensors", "tp8/rank-3/m.safetensors", "ep8/rank-7/x")
    ranks = {name: ranks_of(name) for name in names}
    assert needed_files(ranks, None) == set(names)
    assert needed_files(ranks, (3,)) == {"config.json", "tp4/rank-3/m.safetensors", "tp8/rank-3/m.safetensors"}
    assert needed_files(ranks, (3,), "tp8") == {"config.json", "tp8/rank-3/m.safetensors"}
    assert known_ranks(ranks) == {3, 7}
    assert known_ranks(ranks, "ep8") == {7}
    assert known_ranks(ranks, "tp2") == set()
