"""Loading one tensor-parallel rank: its files alone, and only if they are the signed ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from opened_releases import opened
from refusals import refusal
from tiny_releases import (
    SHARDS,
    flip_byte,
    rank_tensors,
    same_tensors,
    sign,
    signed_release,
    write_release,
)

from memopt.errors import (
    ContentError,
    LayoutError,
    MissingFileError,
    UsageError,
)
from memopt.manifests.safetensors_index import INDEX_NAME


def test_a_rank_reads_its_files_alone(tmp_path: Path) -> None:
    folder = signed_release(tmp_path / "release", rows=8, num_ranks=4)
    expected = rank_tensors(0, 8, 3, 4) | rank_tensors(1, 8, 3, 4)
    for path in folder.rglob("*.safetensors*"):
        if path.parent != folder / "tp4" / "rank-3":
            path.unlink()
    with opened(folder) as release:
        assert release.ranks == (0, 1, 2, 3)
        assert same_tensors(release.load(rank=3), expected)
        assert same_tensors(dict(release.iter_tensors(rank=3)), expected)
        assert same_tensors(release.load(rank=3, tensor_parallel=4), expected)
        wanted = {f"tp4/rank-3/{name}" for name in (*SHARDS, INDEX_NAME)}
        assert {name for name in release.files_for(3) if "safetensors" in name} == wanted
        with refusal(MissingFileError, "tp4/rank-2"):
            release.load(rank=2)
        with refusal(MissingFileError, INDEX_NAME):
            release.load()
        with refusal(UsageError, "no files of rank 4", "0, 1, 2, 3"):
            release.load(rank=4)
        with refusal(UsageError, "tp8"):
            release.load(rank=3, tensor_parallel=8)
    (folder / "tp4" / "rank-3" / "extra.safetensors").touch()
    with refusal(LayoutError, "tp4/rank-3/extra.safetensors"):
        opened(folder)


def test_two_rank_layouts(tmp_path: Path) -> None:
    folder = tmp_path / "release"
    write_release(folder, rows=8, num_ranks=2)
    shutil.copytree(folder / "tp2", folder / "tp4")
    sign(folder)
    with opened(folder) as release:
        with refusal(UsageError, "tp2/rank-1/", "tp4/rank-1/"):
            release.load(rank=1)
        assert same_tensors(
            release.load(rank=1, tensor_parallel=4), rank_tensors(0, 8, 1, 2) | rank_tensors(1, 8, 1, 2)
        )


def test_a_flipped_rank_file(tmp_path: Path) -> None:
    folder = signed_release(tmp_path / "release", rows=8, num_ranks=2)
    flip_byte(folder / "tp2" / "rank-1" / SHARDS[0], -1)
    with opened(folder) as release:
        release.load()
        release.load(rank=0)
        with pytest.raises(ContentError, match=f"tp2/rank-1/{SHARDS[0]}"):
            release.load(rank=1)
