"""Files that hold another file's signed bytes are named as swapped, by verify and by the loader."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opened_releases import opened, whole_file_release
from refusals import refusal
from tiny_ranks import signed_rank_release, swap
from tiny_releases import NOW, POLICY, SHARDS, THREE_CHUNKS, add_zeros, flip_byte, signed_release

from memopt.errors import ContentError
from memopt.manifests import swapped_files
from memopt.manifests.digest import CHUNK_SIZE_BYTES
from memopt.manifests.release import Release
from memopt.manifests.verdict import Finding, Verdict
from memopt.manifests.verify import VerifyOptions, verify_release

FIRST, SECOND = (f"tp2/rank-{rank}/{SHARDS[0]}" for rank in range(2))


def check(folder: Path, **options: Any) -> Verdict:
    return verify_release(folder, POLICY, VerifyOptions(**({"now": NOW} | options)))


def only_content(verdict: Verdict) -> dict[str | None, str]:
    """Message by file; every finding must be one of content, one a file."""
    assert {finding.code for finding in verdict.findings} == {"MEMOPT_CONTENT"}, verdict.findings
    assert len({finding.file for finding in verdict.findings}) == len(verdict.findings)
    return {finding.file: finding.message for finding in verdict.findings}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return signed_rank_release(tmp_path_factory.mktemp("original") / "release", "tp2")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "release")


@pytest.fixture
def swapped(folder: Path) -> Path:
    swap(folder / FIRST, folder / SECOND)
    return folder


@pytest.mark.parametrize("quick", [False, True])
def test_two_rank_files(swapped: Path, quick: bool) -> None:
    verdict = check(swapped, quick=quick)
    assert verdict.exit_code == 4
    assert only_content(verdict) == {
        FIRST: f"its bytes are those signed for {SECOND}: the two files were swapped",
        SECOND: f"its bytes are those signed for {FIRST}: the two files were swapped",
    }
    assert not verdict.is_ok


def test_one_rank_alone(swapped: Path) -> None:
    """The other file is not this rank's: it is looked at only to say what happened."""
    verdict = check(swapped, ranks=(0,))
    assert only_content(verdict) == {FIRST: f"its bytes are those signed for {SECOND}: the two files were swapped"}
    (swapped / SECOND).unlink()
    verdict = check(swapped, ranks=(0,))
    assert only_content(verdict) == {FIRST: f"its bytes are those signed for {SECOND}: files were mixed up"}


def test_whole_folders_of_ranks(folder: Path) -> None:
    ranks = folder / "tp2"
    (ranks / "rank-0").rename(ranks / "x")
    (ranks / "rank-1").rename(ranks / "rank-0")
    (ranks / "x").rename(ranks / "rank-1")
    found = only_content(check(folder))
    assert set(found) == {f"tp2/rank-{rank}/{name}" for rank in range(2) for name in SHARDS}
    assert all("the two files were swapped" in message for message in found.values())


def test_files_of_other_sizes_and_of_no_rank(folder: Path) -> None:
    swap(folder / "config.json", folder / SHARDS[1])
    found = only_content(check(folder))
    assert found["config.json"] == f"its bytes are those signed for {SHARDS[1]}: the two files were swapped"
    assert found[SHARDS[1]] == "its bytes are those signed for config.json: the two files were swapped"
    with refusal(ContentError, "config.json", "the two files were swapped"):
        opened(folder)


def test_a_cycle_and_a_copy_are_no_swap(tmp_path: Path) -> None:
    folder = signed_rank_release(tmp_path / "release", "tp4")
    names = [f"tp4/rank-{rank}/{SHARDS[0]}" for rank in range(4)]
    held = [(folder / name).read_bytes() for name in names]
    for name, raw in zip(names, [held[1], held[2], held[0], held[0]], strict=True):
        (folder / name).write_bytes(raw)
    assert only_content(check(folder)) == {
        name: f"its bytes are those signed for {owner}: files were mixed up"
        for name, owner in zip(names, [names[1], names[2], names[0], names[0]], strict=True)
    }


def test_bytes_of_nobody_keep_their_chunks(folder: Path) -> None:
    flip_byte(folder / FIRST, -1)
    (finding,) = check(folder).findings
    assert (finding.file, finding.chunk) == (FIRST, 0)
    assert "is not what was signed" in finding.message
    swap(folder / FIRST, folder / SECOND)
    found: dict[str | None, Finding] = {finding.file: finding for finding in check(folder).findings}
    assert found[FIRST].message == f"its bytes are those signed for {SECOND}: files were mixed up"
    assert found[SECOND].chunk == 0


def test_an_empty_or_missing_file_is_nobodys(folder: Path) -> None:
    (folder / FIRST).write_bytes(b"")
    (folder / SECOND).unlink()
    messages = [finding.message for finding in check(folder).findings]
    assert not any("signed for" in message for message in messages)


def _iterated(release: Release) -> list[object]:
    return list(release.iter_tensors(rank=0))


def _filled(release: Release) -> None:
    release.load_into({"model.layers.0.norm.weight": torch.zeros(7)}, rank=0)


def _copied(release: Release) -> None:
    with TemporaryFile() as file:
        release.copy_files([(FIRST, file.fileno())])


@pytest.mark.parametrize(
    "use",
    [
        lambda release: release.load(rank=0),
        lambda release: release.load(rank=0, device="meta"),
        _iterated,
        _filled,
        lambda release: release.read_file(FIRST),
        _copied,
    ],
)
def test_the_loader_names_it_too(swapped: Path, use: Callable[[Release], object]) -> None:
    with opened(swapped) as release, refusal(ContentError, FIRST, f"signed for {SECOND}: the two files were swapped"):
        use(release)


def test_the_loader_names_swapped_hub_files(tmp_path: Path) -> None:
    folder = signed_release(tmp_path / "release")
    swap(folder / SHARDS[0], folder / SHARDS[1])
    uses: tuple[Callable[[Release], object], ...] = (
        lambda release: release.load(),
        lambda release: release.tensors(["model.layers.0.norm.weight"]),
    )
    with opened(folder) as release:
        for use in uses:
            with refusal(ContentError, "signed for", "the two files were swapped"):
                use(release)


def test_an_open_release_sees_files_that_are_put_back(swapped: Path) -> None:
    with opened(swapped) as release:
        with refusal(ContentError, "the two files were swapped"):
            release.load(rank=0)
        swap(swapped / FIRST, swapped / SECOND)
        assert release.load(rank=0)
        flip_byte(swapped / FIRST, -1)
        with pytest.raises(ContentError, match="chunk 0"):
            release.load(rank=0)


def test_what_a_consumer_raises_is_its_own(folder: Path) -> None:
    with opened(folder) as release, refusal(ContentError, "mine"):
        for _ in release.iter_tensors(rank=0):
            raise ContentError("mine", file=FIRST)


def test_a_release_signed_in_whole_files(tmp_path: Path) -> None:
    folder = whole_file_release(tmp_path / "release")
    swap(folder / SHARDS[0], folder / SHARDS[1])
    found = only_content(check(folder))
    assert found[SHARDS[0]] == f"its bytes are those signed for {SHARDS[1]}: the two files were swapped"
    with opened(folder) as release, refusal(ContentError, "the two files were swapped"):
        release.load()


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """(file, bytes) of every piece that is hashed to find a file's owner."""
    pieces: list[tuple[str, int]] = []
    sha256 = swapped_files._sha256

    def counted(descriptor: int, start: int, end: int, name: str) -> bytes:
        pieces.append((name, end - start))
        return sha256(descriptor, start, end, name)

    monkeypatch.setattr(swapped_files, "_sha256", counted)
    return pieces


def test_only_failing_files_cost_time(tmp_path: Path, hashed: list[tuple[str, int]]) -> None:
    folder = signed_release(tmp_path / "release", rows=THREE_CHUNKS)
    assert check(folder).is_ok
    assert hashed == []
    # The second chunk: the first one, whose bytes are nobody else's, is all that is read again.
    flip_byte(folder / SHARDS[0], CHUNK_SIZE_BYTES)
    check(folder)
    assert hashed == [(SHARDS[0], CHUNK_SIZE_BYTES)]
    flip_byte(folder / SHARDS[0], CHUNK_SIZE_BYTES)
    hashed.clear()
    swap(folder / SHARDS[0], folder / SHARDS[1])
    check(folder)
    size = (folder / SHARDS[0]).stat().st_size
    assert sum(size_bytes for _, size_bytes in hashed) == 2 * size


def test_many_equal_files(tmp_path: Path) -> None:
    folder = signed_release(tmp_path / "release")
    for number in range(12):
        add_zeros(folder, f"zeros-{number:02}.bin.part", CHUNK_SIZE_BYTES)
    swap(folder / "zeros-11.bin.part", folder / SHARDS[0])
    found = only_content(check(folder))
    assert found["zeros-11.bin.part"] == f"its bytes are those signed for {SHARDS[0]}: the two files were swapped"
    assert found[SHARDS[0]] == "its bytes are those signed for zeros-00.bin.part: files were mixed up"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(list(permutations(range(4)))))
def test_any_order_of_four_files(original: Path, order: tuple[int, ...]) -> None:
    """Every file that moved is told where it belongs; the ones that did not are not named."""
    names = [f"tp2/rank-{rank}/{shard}" for rank in range(2) for shard in SHARDS]
    held = [(original / name).read_bytes() for name in names]
    try:
        for place, owner in enumerate(order):
            (original / names[place]).write_bytes(held[owner])
        verdict = check(original)
        expected = {
            names[place]: f"its bytes are those signed for {names[owner]}: "
            + ("the two files were swapped" if order[owner] == place else "files were mixed up")
            for place, owner in enumerate(order)
            if place != owner
        }
        assert {finding.file: finding.message for finding in verdict.findings} == expected
    finally:
        for name, raw in zip(names, held, strict=True):
            (original / name).write_bytes(raw)
