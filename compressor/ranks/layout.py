"""Which layouts a release is written in: the hub's, for engines, and one folder of files for each rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memopt.errors import UsageError
from memopt.manifests.rank_folders import MAX_RANKS, RankLayout

# What `--layout` takes. "tp": rank files alone, of whichever kind (--tp or --ep).
LayoutChoice = Literal["hub", "tp", "both"]
HUB = "hub"
TENSOR_PARALLEL = "tp"
EXPERT_PARALLEL = "ep"


@dataclass(frozen=True, slots=True)
class Layouts:
    """`ranks`: the rank layout, None without one. `writes_hub`: whether the hub files are written."""

    ranks: RankLayout | None = None
    writes_hub: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """As release.json lists them: "hub", "tp8"."""
        return (*((HUB,) if self.writes_hub else ()), *((self.ranks.folder,) if self.ranks is not None else ()))


def rank_layout(tensor_parallel: int | None, expert_parallel: int | None) -> RankLayout | None:
    """The ranks that two degrees ask for; None without any.

    Expert-parallel N is vLLM's `-tp N --enable-expert-parallel`: routed experts are whole on one of N ranks, everything
    else is cut as under tensor-parallel N. UsageError for degrees that differ, or are not within 1 and MAX_RANKS.
    """
    for name, degree in (("tensor-parallel", tensor_parallel), ("expert-parallel", expert_parallel)):
        if degree is not None and degree < 1:
            raise UsageError(f"{name} degree {degree} is not positive")
        if degree is not None and degree > MAX_RANKS:
            raise UsageError(f"{name} degree {degree} is more than {MAX_RANKS} ranks")
    if expert_parallel is None:
        return None if tensor_parallel is None else RankLayout(TENSOR_PARALLEL, tensor_parallel)
    if tensor_parallel not in {None, expert_parallel}:
        raise UsageError(
            f"tensor-parallel {tensor_parallel} and expert-parallel {expert_parallel}: the experts would be on other "
            "ranks than the rest",
            remedy="give one of them, or the same degree for both",
        )
    return RankLayout(EXPERT_PARALLEL, expert_parallel)


def choose_layouts(
    tensor_parallel: int | None, expert_parallel: int | None, choice: LayoutChoice | None = None
) -> Layouts:
    """What is written for two degrees and a choice; None chooses both, or the hub alone for less than two ranks.

    UsageError as `rank_layout`, and for rank files without a degree.
    """
    ranks = rank_layout(tensor_parallel, expert_parallel)
    if choice is None:
        # The files of one rank would be the hub files again.
        choice = "hub" if ranks is None or ranks.num_ranks == 1 else "both"
    if choice == HUB:
        return Layouts()
    if ranks is None:
        raise UsageError(f"layout {choice} has rank files, but for how many ranks?", remedy="give --tp N or --ep N")
    return Layouts(ranks, writes_hub=choice == "both")
