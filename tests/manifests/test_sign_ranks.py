"""Signing a release with rank files: nothing is signed whose ranks are not those of the ledger."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
from refusals import refusal
from release_files import contents
from tiny_ranks import (
    bend_ledger,
    layout_of,
    rank_tensors,
    signed_rank_release,
    swap,
    write_rank_release,
    write_tensors,
)
from tiny_releases import NOW, POLICY, SHARDS, flip_byte, sign

from memopt.errors import ContentError, LayoutError, LedgerError, TruncatedError
from memopt.manifests.ledger_digests import LedgerDigests
from memopt.manifests.ledger_output import LedgerOutput, RankSlices
from memopt.manifests.rank_folders import RankFolder, RankLayout
from memopt.manifests.safetensors_header import TensorHeader
from memopt.manifests.signed_files import PlainFiles
from memopt.manifests.verify import VerifyOptions, verify_release

LAYOUTS = [("tp1", True), ("tp2", True), ("tp4", False), ("ep2", True), ("ep4", False)]


@pytest.mark.parametrize(("layout", "has_hub"), LAYOUTS)
@pytest.mark.parametrize("has_metadata", [False, True])
def test_sound_releases(layout: str, has_hub: bool, has_metadata: bool, tmp_path: Path) -> None:
    folder = signed_rank_release(tmp_path / "release", layout, has_hub=has_hub, has_metadata=has_metadata)
    verdict = verify_release(folder, POLICY, VerifyOptions(now=NOW))
    assert verdict.is_ok, verdict.findings
    for path in folder.rglob("*.safetensors*"):
        if path.parent != folder / layout / "rank-0":
            path.unlink()
    verdict = verify_release(folder, POLICY, VerifyOptions(ranks=(0,), now=NOW))
    assert verdict.is_ok, verdict.findings
    assert verdict.is_partial == (layout != "tp1" or has_hub)


@pytest.mark.parametrize(("layout", "has_hub"), LAYOUTS[1:])
def test_files_swapped_before_signing_are_named_by_their_headers(layout: str, has_hub: bool, tmp_path: Path) -> None:
    folder = write_rank_release(tmp_path / "release", layout, has_hub=has_hub)
    swap(folder / layout / "rank-0" / SHARDS[0], folder / layout / "rank-1" / SHARDS[0])
    before = contents(folder)
    words = f"holds rank 1 of {layout}, but lies at rank 0: rank files were swapped"
    with refusal(LayoutError, f"{layout}/rank-0/{SHARDS[0]}", words):
        sign(folder)
    assert contents(folder) == before


@pytest.mark.parametrize("has_hub", [False, True])
def test_without_metadata_they_are_named_by_their_bytes(has_hub: bool, tmp_path: Path) -> None:
    folder = write_rank_release(tmp_path / "release", "tp4", has_hub=has_hub, has_metadata=False)
    swap(folder / "tp4" / "rank-3" / SHARDS[1], folder / "tp4" / "rank-0" / SHARDS[1])
    before = contents(folder)
    words = ("not those that ledger.jsonl names, they are those of rank", "rank files were swapped", SHARDS[1])
    with refusal(ContentError, *words):
        sign(folder)
    assert contents(folder) == before


def test_a_rank_in_the_place_of_the_hub_files(tmp_path: Path) -> None:
    folder = write_rank_release(tmp_path / "release", "tp1")
    shutil.copy(folder / "tp1" / "rank-0" / SHARDS[0], folder / SHARDS[0])
    with refusal(LayoutError, SHARDS[0], "holds rank 0 of tp1, but lies among the hub files"):
        sign(folder)


@pytest.mark.parametrize(("layout", "has_hub"), LAYOUTS)
def test_a_rank_file_of_another_release(layout: str, has_hub: bool, tmp_path: Path) -> None:
    """Same names, shapes and metadata; only the bytes tell."""
    folder = write_rank_release(tmp_path / "release", layout, has_hub=has_hub)
    part = RankFolder(layout_of(layout), 0)
    tensors = rank_tensors(0, part)
    name = next(name for name in tensors if name.endswith("attention.weight"))
    write_tensors(folder / part.path / SHARDS[0], tensors | {name: tensors[name] + 1}, {"format": "pt"} | part.metadata)
    with refusal(
        ContentError, f"{layout}/rank-0/{SHARDS[0]}", name, "not those that ledger.jsonl names (compress again"
    ):
        sign(folder)


@pytest.mark.parametrize(("layout", "has_hub"), LAYOUTS)
def test_every_changed_byte_of_a_rank_is_found(layout: str, has_hub: bool, tmp_path: Path) -> None:
    folder = write_rank_release(tmp_path / "release", layout, has_hub=has_hub)
    path = folder / layout / "rank-0" / SHARDS[0]
    size, data_start = path.stat().st_size, 8 + int.from_bytes(path.read_bytes()[:8], "little")
    for offset in {*range(data_start, size, 97), size - 1}:
        flip_byte(path, offset)
        with refusal(ContentError, f"{layout}/rank-0/{SHARDS[0]}", "ledger.jsonl"):
            sign(folder)
        flip_byte(path, offset)
    sign(folder)


def test_a_replicated_tensor_that_differs_on_one_rank(tmp_path: Path) -> None:
    folder = write_rank_release(tmp_path / "release", "tp2")
    part = RankFolder(layout_of("tp2"), 1)
    tensors = rank_tensors(0, part)
    name = next(name for name in tensors if name.endswith("norm.weight"))
    write_tensors(folder / part.path / SHARDS[0], tensors | {name: -tensors[name]}, {"format": "pt"} | part.metadata)
    with refusal(ContentError, f"tp2/rank-1/{SHARDS[0]}", name):
        sign(folder)


@pytest.mark.parametrize(("layout", "has_hub"), LAYOUTS[1:])
def test_a_missing_rank_is_not_signed(layout: str, has_hub: bool, tmp_path: Path) -> None:
    folder = write_rank_release(tmp_path / "release", layout, has_hub=has_hub)
    shutil.rmtree(folder / layout / "rank-1")
    with refusal(LayoutError, f"rank 1 of {layout} is not complete"):
        sign(folder)


def test_a_ledger_that_lies_about_ranks(tmp_path: Path) -> None:
    folder = write_rank_release(tmp_path / "release", "tp2")
    bend_ledger(folder, "attention.weight", lambda output: output["ranks"].update(cut="columns"))
    with refusal(LedgerError, "ledger.jsonl:", "add up to"):
        sign(folder)
    bend_ledger(folder, "attention.weight", lambda output: output["ranks"].update(cut="rows"))
    bend_ledger(folder, "attention.weight", lambda output: output["ranks"]["sha256"].reverse())
    with refusal(ContentError, "attention.weight", "they are those of rank"):
        sign(folder)
    bend_ledger(folder, "attention.weight", lambda output: output["ranks"]["sha256"].reverse())
    sign(folder)


def test_a_truncated_rank_file(tmp_path: Path) -> None:
    folder = write_rank_release(tmp_path / "release", "ep2")
    path = folder / "ep2" / "rank-1" / SHARDS[1]
    path.write_bytes(path.read_bytes()[:-1])
    with refusal(TruncatedError, f"ep2/rank-1/{SHARDS[1]}"):
        sign(folder)


def test_a_second_layout_that_the_ledger_does_not_name_is_signed(tmp_path: Path) -> None:
    folder = write_rank_release(tmp_path / "release", "tp2")
    other = write_rank_release(tmp_path / "other", "tp4")
    shutil.copytree(other / "tp4", folder / "tp4")
    sign(folder)
    assert verify_release(folder, POLICY, VerifyOptions(now=NOW)).is_ok


def test_what_the_digests_say_nothing_of() -> None:
    tensor = TensorHeader("t", "BF16", (2,), 0, 4)
    digests = [hashlib.sha256(bytes([n])).hexdigest() for n in range(3)]
    slices = RankSlices(RankLayout("tp", 2), "rows", None, tensor, tuple(digests[:2]))
    known = LedgerDigests([LedgerOutput(None, tensor, digests[2], slices)])
    source = PlainFiles(-1)  # nothing is read before a file's first bytes come
    for name in ("m.safetensors", "tp4/rank-0/m.safetensors", "tp2/rank-2/m.safetensors", "a/m.safetensors"):
        assert known.watch(name, source) is None
    assert known.watch("tp2/rank-1/m.safetensors", source) is not None
    none = LedgerDigests([])
    assert none.watch("m.safetensors", source) is None
