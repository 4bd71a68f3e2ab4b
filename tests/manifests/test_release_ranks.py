"""Loading one rank: its files alone, and only if they are the signed ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from opened_releases import opened
from refusals import refusal
from tiny_ranks import layout_of, signed_rank_release, swap, write_rank_release
from tiny_ranks import rank_tensors as ledger_rank_tensors
from tiny_releases import (
    NOW,
    POLICY,
    SHARDS,
    flip_byte,
    rank_tensors,
    same_tensors,
    sign,
    sign_anyway,
    signed_release,
    write_release,
)

from memopt.errors import (
    ContentError,
    LayoutError,
    MissingFileError,
    UsageError,
)
from memopt.manifests.rank_folders import RankFolder
from memopt.manifests.safetensors_index import INDEX_NAME
from memopt.manifests.verify import VerifyOptions, verify_release


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


@pytest.fixture
def two_layouts(tmp_path: Path) -> Path:
    """tp2 and ep2 in one release."""
    folder = write_rank_release(tmp_path / "release", "tp2")
    other = write_rank_release(tmp_path / "other", "ep2")
    shutil.copytree(other / "ep2", folder / "ep2")
    return sign(folder)


def test_the_same_rank_in_two_kinds_of_layout(two_layouts: Path) -> None:
    def held(layout: str) -> dict[str, torch.Tensor]:
        part = RankFolder(layout_of(layout), 1)
        return ledger_rank_tensors(0, part) | ledger_rank_tensors(1, part)

    with opened(two_layouts) as release:
        assert release.ranks == (0, 1)
        with refusal(UsageError, "ep2/rank-1/", "tp2/rank-1/", "expert_parallel"):
            release.load(rank=1)
        for use in (release.load, lambda **options: dict(release.iter_tensors(**options))):
            assert same_tensors(use(rank=1, tensor_parallel=2), held("tp2"))
            assert same_tensors(use(rank=1, expert_parallel=2), held("ep2"))
        filled = {name: torch.zeros_like(tensor) for name, tensor in held("ep2").items()}
        release.load_into(filled, rank=1, expert_parallel=2)
        assert same_tensors(filled, held("ep2"))
        with refusal(UsageError, "rank 1 is not in ep4/", "ep2/rank-1/"):
            release.load(rank=1, expert_parallel=4)
        with refusal(UsageError, "exclude each other"):
            release.load(rank=1, expert_parallel=2, tensor_parallel=2)
        for wrong in (release.load, release.files_for):
            with refusal(UsageError, "no rank is named"):
                wrong(expert_parallel=2)
        chosen = release.files_for(1, expert_parallel=2)
        assert {name for name in chosen if "/" in name} == {f"ep2/rank-1/{name}" for name in (*SHARDS, INDEX_NAME)}
        assert "ledger.jsonl" in chosen
        assert len(release.files_for(1)) == len(chosen) + 3


def test_one_layout_of_a_rank_is_enough(two_layouts: Path) -> None:
    shutil.rmtree(two_layouts / "tp2")
    options = VerifyOptions(ranks=(1,), now=NOW)
    assert verify_release(two_layouts, POLICY, options).exit_code == 6
    verdict = verify_release(two_layouts, POLICY, replace(options, expert_parallel=2))
    assert (verdict.is_ok, verdict.is_partial) == (True, True)
    assert verify_release(two_layouts, POLICY, replace(options, tensor_parallel=2)).exit_code == 6
    for wrong, words in (
        ({"expert_parallel": 4}, "no rank layout ep4"),
        ({"expert_parallel": 2, "ranks": (1, 2)}, "no rank 2 in ep2"),
        ({"expert_parallel": 2, "ranks": None}, "no rank is named"),
        ({"expert_parallel": 2, "tensor_parallel": 2}, "exclude each other"),
    ):
        with refusal(UsageError, words):
            verify_release(two_layouts, POLICY, replace(options, **wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["tp2", "ep2"])
def test_rank_files_without_hub_files(layout: str, tmp_path: Path) -> None:
    folder = signed_rank_release(tmp_path / "release", layout, has_hub=False)
    part = RankFolder(layout_of(layout), 1)
    shutil.rmtree(folder / layout / "rank-0")
    with opened(folder) as release:
        expected = ledger_rank_tensors(0, part) | ledger_rank_tensors(1, part)
        assert same_tensors(release.load(rank=1), expected)
        uses: tuple[Callable[[], object], ...] = (
            release.load,
            lambda: release.tensor_names,
            lambda: release.tensors(["x"]),
            lambda: release.load_into({}),
            lambda: list(release.iter_tensors()),
        )
        for use in uses:
            with refusal(UsageError, "no hub layout", "ranks 0, 1"):
                use()


def test_a_careless_signer_of_swapped_ranks(tmp_path: Path) -> None:
    """Signed all the same, by somebody who checked nothing: the headers tell."""
    folder = signed_rank_release(tmp_path / "release", "tp2")
    swap(folder / "tp2" / "rank-0" / SHARDS[1], folder / "tp2" / "rank-1" / SHARDS[1])
    sign_anyway(folder)
    with opened(folder) as release:
        release.load()
        with refusal(LayoutError, f"tp2/rank-1/{SHARDS[1]}", "holds rank 0 of tp2, but lies at rank 1"):
            release.load(rank=1)


def test_a_flipped_rank_file(tmp_path: Path) -> None:
    folder = signed_release(tmp_path / "release", rows=8, num_ranks=2)
    flip_byte(folder / "tp2" / "rank-1" / SHARDS[0], -1)
    with opened(folder) as release:
        release.load()
        release.load(rank=0)
        with pytest.raises(ContentError, match=f"tp2/rank-1/{SHARDS[0]}"):
            release.load(rank=1)
