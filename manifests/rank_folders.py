"""The folders of rank files (tp8/rank-3/, ep8/rank-3/), and what a rank file's header says of its place.

docs/formats.md, "Rank layout": tp8 is cut for 8 tensor-parallel ranks, ep8 keeps routed experts whole on one of 8.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from memopt.errors import LayoutError, UsageError

MAX_RANKS = 4096
RANK_KEY = "rank"
# The key of a header's __metadata__ that holds the number of ranks, by kind of layout.
DEGREE_KEYS = {"tp": "tensor_parallel", "ep": "expert_parallel"}
_LAYOUT = re.compile(r"(tp|ep)([1-9][0-9]{0,3})")
_FOLDER = re.compile(rf"({_LAYOUT.pattern})/rank-(0|[1-9][0-9]{{0,3}})/")


@dataclass(frozen=True, slots=True)
class RankLayout:
    """How a release is divided among ranks. `kind`: "tp" or "ep"."""

    kind: str
    num_ranks: int

    @property
    def folder(self) -> str:
        """The folder of the layout in a release, as "tp8"."""
        return f"{self.kind}{self.num_ranks}"


@dataclass(frozen=True, slots=True)
class RankFolder:
    """The folder of one rank's files."""

    layout: RankLayout
    rank: int

    @property
    def path(self) -> str:
        """The folder below the release, as "tp8/rank-3/"."""
        return f"{self.layout.folder}/rank-{self.rank}/"

    @property
    def metadata(self) -> dict[str, str]:
        """What __metadata__ of its files says of their place."""
        return {DEGREE_KEYS[self.layout.kind]: str(self.layout.num_ranks), RANK_KEY: str(self.rank)}


@lru_cache(maxsize=64)
def parse_layout(text: str) -> RankLayout | None:
    """The layout whose folder is `text` ("tp8"); None for any other text."""
    found = _LAYOUT.fullmatch(text)
    return None if found is None else RankLayout(found[1], int(found[2]))


def rank_folder_of(path: str) -> RankFolder | None:
    """The rank that a file belongs to, from its name; None for a file of all ranks."""
    found = _FOLDER.match(path)
    return None if found is None else RankFolder(RankLayout(found[2], int(found[3])), int(found[4]))


def chosen_layout(tensor_parallel: int | None, expert_parallel: int | None) -> str | None:
    """The folder of the layout that two arguments name; None if neither does. UsageError if both do, or for 0."""
    given = {kind: n for kind, n in (("tp", tensor_parallel), ("ep", expert_parallel)) if n is not None}
    if len(given) > 1:
        raise UsageError("tensor_parallel and expert_parallel exclude each other", remedy="name one rank layout")
    for kind, num_ranks in given.items():
        if not 1 <= num_ranks <= MAX_RANKS:
            raise UsageError(f"{DEGREE_KEYS[kind]} is {num_ranks}, it must be within 1 and {MAX_RANKS}")
        return RankLayout(kind, num_ranks).folder
    return None


def place_problem(name: str, metadata: Mapping[str, str]) -> LayoutError | None:
    """The refusal of a weight file whose header names another rank than the folder it lies in; None if all is well.

    A header that names no rank, as other tools write it, is well anywhere.
    """
    degrees = {kind: metadata[key] for kind, key in DEGREE_KEYS.items() if key in metadata}
    if RANK_KEY not in metadata or not degrees:
        return None
    claimed = {DEGREE_KEYS[kind]: degree for kind, degree in degrees.items()} | {RANK_KEY: metadata[RANK_KEY]}
    place = rank_folder_of(name)
    if place is not None and claimed == place.metadata:
        return None
    layout = " and ".join(f"{kind}{_shown(degree)}" for kind, degree in degrees.items())
    where = "among the hub files" if place is None else f"at rank {place.rank}"
    if place is not None and layout != place.layout.folder:
        where += f" of {place.layout.folder}"
    return LayoutError(
        f"holds rank {_shown(metadata[RANK_KEY])} of {layout}, but lies {where}: rank files were swapped",
        file=name,
        remedy="put every rank's files back into its folder, or fetch the release again",
    )


def _shown(text: str) -> str:
    """A number as it is, anything else so that it cannot break a line."""
    return text if text.isascii() and text.isdigit() and len(text) <= 4 else f"{text[:20]!a}"
