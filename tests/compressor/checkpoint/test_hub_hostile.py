"""A Hub whose index, listing or names are hostile: refused before anything is requested or written."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memopt.compressor.checkpoint.hub import HubReference, RetryPolicy, download_snapshot
from memopt.compressor.checkpoint.hub_listing import parse_listing
from memopt.errors import IndexFileError, MalformedError, MemoptError, MissingFileError, SourceChangedError

sys.path.insert(0, str(Path(__file__).parents[2]))
from hub_server import HubServer, running_hub

TINY = Path(__file__).parents[3] / "examples" / "tiny-glm5-fp8"
REPO = "zai-org/small"
REFERENCE = HubReference(REPO, "main")
QUICK = RetryPolicy(attempts=3, first_wait_s=0.01, longest_wait_s=0.02)
FIRST = "model-00001-of-00003.safetensors"
BLOB = "ab" * 20


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with running_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    shutil.copytree(TINY, folder)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def write_index(folder: Path, **weight_map: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "sub/model.safetensors", "..", "../a.safetensors", "a\\b.safetensors"]
)
def test_an_index_that_leaves_its_folder(hub: HubServer, source: Path, cache: Path, name: str) -> None:
    write_index(source, a=name)
    hub.add(REPO, source)
    with pytest.raises(IndexFileError):
        download_snapshot(REFERENCE, cache_dir=cache, retry=QUICK)
    assert {file for file in hub.requested_files() if "safetensors" in file} == {"model.safetensors.index.json"}


def test_an_index_that_names_a_missing_file(hub: HubServer, source: Path, cache: Path) -> None:
    write_index(source, a=FIRST, c="model-00003.safetensors")
    hub.add(REPO, source)
    with pytest.raises(MissingFileError, match=r"model-00003\.safetensors"):
        download_snapshot(REFERENCE, cache_dir=cache, retry=QUICK)
    assert FIRST not in hub.requested_files()


@pytest.mark.parametrize(
    "entry",
    [
        {"rfilename": "../../LICENSE", "size": 1, "blobId": BLOB},
        {"rfilename": "/LICENSE", "size": 1, "blobId": BLOB},
        {"rfilename": "a/../LICENSE", "size": 1, "blobId": BLOB},
        {"rfilename": "LICENSE", "size": 1, "blobId": "../../../outside"},
        {"rfilename": "LICENSE", "size": 1, "blobId": BLOB, "lfs": {"sha256": "../x", "size": 1}},
        {"rfilename": "LICENSE", "size": -1, "blobId": BLOB},
        {"rfilename": "LICENSE", "size": "1", "blobId": BLOB},
        {"rfilename": "LICENSE", "size": 1},
        {"rfilename": "config.json", "size": 1, "blobId": BLOB},
        {"rfilename": 7},
        {"rfilename": "\ud800"},
        "LICENSE",
    ],
)
def test_a_hostile_listing_is_refused(hub: HubServer, source: Path, cache: Path, entry: Any) -> None:
    hub.add(REPO, source)
    hub.faults.extra_listed = [entry]
    with pytest.raises(MalformedError):
        download_snapshot(REFERENCE, cache_dir=cache, retry=QUICK)
    assert hub.requested_files() == set()
    assert not cache.exists()


def test_listed_files_that_cannot_be_needed_are_passed_over(hub: HubServer, source: Path, cache: Path) -> None:
    hub.add(REPO, source)
    names = ["figures/a.png", "sub/config.json", "a\\b", "a\nb", "C:x"]
    hub.faults.extra_listed = [{"rfilename": name, "size": 1, "blobId": BLOB} for name in names]
    snapshot = download_snapshot(REFERENCE, cache_dir=cache, allow_code=True, retry=QUICK)
    assert {file.path for file in snapshot.files} == {path.name for path in source.iterdir()} - {"README.md"}
    assert {file.name for file in snapshot.listing.top if file.size_bytes is None} == {
        "figures/", "sub/", "a\\b", "a\nb", "C:x",
    }  # fmt: skip


def test_a_listing_that_is_no_listing() -> None:
    for raw in (b"<html>", b"[]", b"{}", b'{"sha": "main", "siblings": []}', b"\xff", b'{"sha": "' + b"a" * 40 + b'"}'):
        with pytest.raises(MemoptError, match="zai-org/small@main"):
            parse_listing(raw, REFERENCE)
    other = json.dumps({"sha": "b" * 40, "siblings": []}).encode()
    with pytest.raises(SourceChangedError, match="b" * 40):
        parse_listing(other, HubReference(REPO, "a" * 40))
