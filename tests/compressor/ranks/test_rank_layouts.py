"""Which layouts two degrees and a choice give, and what is refused."""

from __future__ import annotations

import pytest
from refusals import refusal

from memopt.compressor.ranks.layout import LayoutChoice, choose_layouts
from memopt.errors import UsageError


@pytest.mark.parametrize(
    ("tensor_parallel", "expert_parallel", "choice", "names"),
    [
        (None, None, None, ("hub",)),
        (None, None, "hub", ("hub",)),
        (8, None, None, ("hub", "tp8")),
        (8, None, "both", ("hub", "tp8")),
        (8, None, "tp", ("tp8",)),
        (8, None, "hub", ("hub",)),
        (None, 4, None, ("hub", "ep4")),
        (None, 4, "tp", ("ep4",)),
        # vLLM: -tp 4 --enable-expert-parallel.
        (4, 4, None, ("hub", "ep4")),
        # One rank's files would be the hub files again, unless they are asked for.
        (1, None, None, ("hub",)),
        (1, None, "both", ("hub", "tp1")),
    ],
)
def test_layouts(
    tensor_parallel: int | None, expert_parallel: int | None, choice: LayoutChoice | None, names: tuple[str, ...]
) -> None:
    assert choose_layouts(tensor_parallel, expert_parallel, choice).names == names


def test_ranks_of_two_degrees_are_refused_with_the_reason() -> None:
    with refusal(UsageError, "tensor-parallel 2 and expert-parallel 4", "other ranks than the rest", "same degree"):
        choose_layouts(2, 4)


@pytest.mark.parametrize("choice", ["tp", "both"])
def test_rank_files_without_a_degree_are_refused(choice: LayoutChoice) -> None:
    with refusal(UsageError, f"layout {choice}", "how many ranks", "--tp N or --ep N"):
        choose_layouts(None, None, choice)


@pytest.mark.parametrize(("degrees", "word"), [((0, None), "not positive"), ((None, 5000), "more than 4096 ranks")])
def test_degrees_have_bounds(degrees: tuple[int | None, int | None], word: str) -> None:
    with refusal(UsageError, word):
        choose_layouts(*degrees)
