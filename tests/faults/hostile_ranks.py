"""Row 57: releases whose rank files were swapped, lost or changed, and ledgers that lie about them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_ranks import (
    Row,
    bend_ledger,
    layout_of,
    rank_tensors,
    signed_rank_release,
    swap,
    write_rank_release,
    write_tensors,
)
from tiny_releases import SHARDS, flip_byte, sign_anyway, write_index

from faults.hostile_case import Case
from memopt.manifests.rank_folders import RankFolder

FIRST, SECOND = SHARDS
_RANK_0, _RANK_1 = (f"tp2/rank-{rank}/{FIRST}" for rank in range(2))


def _signed(
    layout: str = "tp2",
    bend: Callable[[Path], Any] | None = None,
    *,
    before: Callable[[Path], Any] | None = None,
    has_hub: bool = True,
    has_metadata: bool = True,
) -> Callable[[Path], Path]:
    """A release that was bent `before` somebody careless signed it, or afterwards."""

    def make(folder: Path) -> Path:
        release = signed_rank_release(folder.parent / "ranks", layout, has_hub=has_hub, has_metadata=has_metadata)
        if before is not None:
            before(release)
            sign_anyway(release)
        if bend is not None:
            bend(release)
        return release

    return make


def _swap(one: str, other: str) -> Callable[[Path], None]:
    return lambda release: swap(release / one, release / other)


def _swap_folders(release: Path) -> None:
    for name in SHARDS:
        swap(release / "tp2/rank-0" / name, release / "tp2/rank-1" / name)


def _ledger(suffix: str, bend: Callable[[Row], Any]) -> Callable[[Path], None]:
    return lambda release: bend_ledger(release, suffix, bend)


def _ranks(suffix: str, **fields: object) -> Callable[[Path], None]:
    return _ledger(suffix, lambda output: output["ranks"].update(fields))


def _another_release(release: Path) -> None:
    """A rank file of the same names, shapes and size; other weights."""
    part = RankFolder(layout_of("tp2"), 0)
    tensors = rank_tensors(0, part)
    name = next(name for name in tensors if name.endswith("attention.weight"))
    write_tensors(release / _RANK_0, tensors | {name: tensors[name] + 1}, {"format": "pt"} | part.metadata)


def _without_a_tensor(release: Path) -> None:
    """One rank's set is not complete, though its header and its index agree."""
    part = RankFolder(layout_of("tp2"), 0)
    tensors = rank_tensors(0, part)
    tensors.pop(next(name for name in tensors if name.endswith("norm.weight")))
    write_tensors(release / _RANK_0, tensors, part.metadata)
    write_index(release / part.path, SHARDS)


def _other_degree(release: Path) -> None:
    other = write_rank_release(release.parent / "other", "tp4")
    shutil.copy(other / "tp4/rank-0" / FIRST, release / _RANK_0)


def _truncate(release: Path) -> None:
    path = release / _RANK_0
    path.write_bytes(path.read_bytes()[:-100])


def _only(rank: int, bend: Callable[[Path], Any] | None = None) -> Callable[[Path], None]:
    """A pod's volume: the files of one rank alone."""

    def make(release: Path) -> None:
        if bend is not None:
            bend(release)
        for path in release.rglob("*.safetensors*"):
            if path.parent.name != f"rank-{rank}":
                path.unlink()

    return make


_SWAPPED = "rank files were swapped"
_BYTES = f"its bytes are those signed for {_RANK_1}"
_LYING: dict[str, tuple[Callable[[Path], None], str]] = {
    "a wrong cut": (_ranks("attention.weight", cut="columns"), "add up to"),
    "slices that do not add up": (_ranks("attention.weight", shape=[5, 128]), "add up to [10, 128]"),
    "too few digests": (_ledger("attention.weight", lambda output: output["ranks"]["sha256"].pop()), "2 digests"),
    "a digest that is not the whole's": (_ranks("norm.weight", sha256=["0" * 64]), "that of the whole"),
    "an owner that is no rank": (_ranks("norm.weight", owner=1), "owner"),
    "a layout of its own": (_ranks("norm.weight", folder="ep2"), "outputs before"),
    "no ranks for one tensor": (_ledger("norm.weight", lambda output: output.pop("ranks")), "outputs before"),
}

CASES = (
    Case(57, "a sound rank", 0, _signed(bend=_only(0)), ("PARTIAL",), rank=0),
    Case(57, "a sound expert-parallel rank", 0, _signed("ep2", _only(1)), ("PARTIAL",), rank=1),
    Case(57, "a sound rank without hub files", 0, _signed(bend=_only(1), has_hub=False), ("PARTIAL",), rank=1),
    # Swapped after signing: the bytes tell, whoever wrote the headers.
    Case(57, "two swapped files", 4, _signed(bend=_swap(_RANK_0, _RANK_1)), (_BYTES, "the two files"), rank=0),
    Case(
        57,
        "two swapped files without metadata",
        4,
        _signed(bend=_swap(_RANK_0, _RANK_1), has_metadata=False),
        (_BYTES, "the two files were swapped"),
        rank=0,
    ),
    Case(57, "two swapped folders", 4, _signed(bend=_swap_folders), (_BYTES, "the two files were swapped"), rank=0),
    Case(57, "a rank alone with another's file", 4, _signed(bend=_only(0, _swap(_RANK_0, _RANK_1))), (_BYTES,), rank=0),
    Case(57, "a rank in the place of a hub file", 4, _signed(bend=_swap(_RANK_1, FIRST)), ("signed for",)),
    # Swapped before signing, by a signer who checked nothing: the headers tell.
    Case(57, "two files signed swapped", 6, _signed(before=_swap(_RANK_0, _RANK_1)), (_SWAPPED,), rank=0),
    Case(57, "two folders signed swapped", 6, _signed(before=_swap_folders), ("rank 1 of tp2", _SWAPPED), rank=0),
    Case(57, "a rank signed as a hub file", 6, _signed(before=_swap(_RANK_1, FIRST)), ("among the hub files",)),
    Case(57, "a file of another degree", 6, _signed(before=_other_degree), ("rank 0 of tp4", _SWAPPED), rank=0),
    Case(57, "a file of another release", 4, _signed(bend=_another_release), (_RANK_0, "chunk 0"), rank=0),
    Case(57, "a truncated file", 4, _signed(bend=_truncate), (_RANK_0, "bytes"), rank=0),
    Case(57, "a truncated file, signed", 8, _signed(before=_truncate), (_RANK_0,), rank=0),
    Case(57, "a flipped bit", 4, _signed("ep2", lambda r: flip_byte(r / "ep2/rank-1" / SECOND, -1)), (SECOND,), rank=1),
    Case(
        57,
        "a missing rank",
        6,
        _signed(bend=lambda release: shutil.rmtree(release / "tp2/rank-1")),
        (_RANK_1, "not there"),
        rank=1,
    ),
    Case(
        57,
        "a missing rank, signed",
        6,
        _signed(before=lambda release: shutil.rmtree(release / "tp2/rank-1")),
        ("rank 1 of tp2 is not complete",),
        rank=0,
    ),
    Case(57, "a rank without a tensor, signed", 6, _signed(before=_without_a_tensor), ("norm.weight",), rank=0),
    Case(57, "a rank that there is not", 2, _signed(), ("rank 2",), rank=2),
    *(
        Case(57, f"a ledger with {name}", 8, _signed(before=bend), (words,), rank=0)
        for name, (bend, words) in _LYING.items()
    ),
)
