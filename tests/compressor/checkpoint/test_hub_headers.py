"""Reading a Hub checkpoint's headers without its weights."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

from memopt.compressor.checkpoint.hub import HubReference, RetryPolicy, download_headers, verify_unchanged
from memopt.errors import (
    HeaderError,
    IndexFileError,
    LfsPointerError,
    MemoptError,
    NetworkError,
    OutputError,
    SourceChangedError,
    TruncatedError,
)
from memopt.manifests.safetensors_header import read_header

sys.path.insert(0, str(Path(__file__).parents[2]))
from hub_server import Cut, HubServer, running_hub

TINY = Path(__file__).parents[3] / "examples" / "tiny-glm5-fp8"
REPO = "zai-org/tiny"
REFERENCE = HubReference(REPO, "main")
QUICK = RetryPolicy(attempts=3, first_wait_s=0.01, longest_wait_s=0.02)
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with running_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def test_headers_parse_and_little_is_sent(hub: HubServer, tmp_path: Path) -> None:
    commit = hub.add(REPO, TINY)
    snapshot = download_headers(REFERENCE, tmp_path / "headers", retry=QUICK)
    assert (snapshot.commit, snapshot.headers_only) == (commit, True)
    for name in SHARDS:
        here, there = snapshot.folder / name, TINY / name
        with safe_open(here, "np") as ours, safe_open(there, "np") as theirs:
            assert list(ours.keys()) == list(theirs.keys())
        header = read_header(here)
        assert header == read_header(there)
        assert here.stat().st_size == there.stat().st_size
        # The sparse file occupies its header, not its size.
        assert here.stat().st_blocks * 512 < 200_000
        assert hub.sent_bytes(name) == header.data_start
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
        assert (snapshot.folder / name).read_bytes() == (TINY / name).read_bytes()
    assert {file.path.name for file in snapshot.verified}.isdisjoint(SHARDS)
    verify_unchanged(snapshot)


def test_the_ordinary_reader_opens_the_folder(hub: HubServer, tmp_path: Path) -> None:
    from memopt.compressor.checkpoint.checkpoint import open_checkpoint

    hub.add(REPO, TINY)
    snapshot = download_headers(REFERENCE, tmp_path / "headers", retry=QUICK)
    assert open_checkpoint(snapshot.folder).tensors == open_checkpoint(TINY).tensors


def one_shard(folder: Path, content: bytes, name: str = "model.safetensors") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ((100_000_001).to_bytes(8, "little") + b"{" * 50, HeaderError),
        ((2**63).to_bytes(8, "little") + b"{" * 50, HeaderError),
        ((500).to_bytes(8, "little") + b"{" * 50, TruncatedError),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", LfsPointerError),
        (b"abc", TruncatedError),
        ((50).to_bytes(8, "little") + b"{" * 50, HeaderError),
        ((0).to_bytes(8, "little"), HeaderError),
    ],
)
def test_a_shard_that_is_no_safetensors_file(
    hub: HubServer, tmp_path: Path, content: bytes, error: type[MemoptError]
) -> None:
    hub.add(REPO, one_shard(tmp_path / "source", content))
    with pytest.raises(error, match=r"zai-org/tiny@main.*model\.safetensors"):
        download_headers(REFERENCE, tmp_path / "headers", retry=QUICK)
    if int.from_bytes(content[:8], "little") > 100:
        assert hub.sent_bytes("model.safetensors") <= 8


def test_a_hostile_index(hub: HubServer, tmp_path: Path) -> None:
    source = one_shard(tmp_path / "source", b"", "model-1.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    hub.add(REPO, source)
    with pytest.raises(IndexFileError, match="etc/passwd"):
        download_headers(REFERENCE, tmp_path / "headers", retry=QUICK)
    assert hub.requested_files() == {"config.json", "model.safetensors.index.json"}


def test_a_server_without_ranges(hub: HubServer, tmp_path: Path) -> None:
    hub.add(REPO, TINY)
    hub.faults.ignore_range = True
    with pytest.raises(NetworkError, match="ignores Range"):
        download_headers(REFERENCE, tmp_path / "headers", retry=QUICK)


def test_cut_connections_are_tried_again(hub: HubServer, tmp_path: Path) -> None:
    hub.add(REPO, TINY)
    hub.faults.cut = {SHARDS[0]: Cut(1000), SHARDS[1]: Cut(3), "tokenizer.json": Cut(5000)}
    snapshot = download_headers(REFERENCE, tmp_path / "headers", retry=QUICK)
    assert read_header(snapshot.folder / SHARDS[0]) == read_header(TINY / SHARDS[0])
    assert (snapshot.folder / "tokenizer.json").read_bytes() == (TINY / "tokenizer.json").read_bytes()


def test_a_wrong_byte_in_the_metadata(hub: HubServer, tmp_path: Path) -> None:
    hub.add(REPO, TINY)
    hub.faults.flip_byte["config.json"] = 7
    with pytest.raises(SourceChangedError, match=r"config\.json has git blob SHA-1"):
        download_headers(REFERENCE, tmp_path / "headers", retry=QUICK)
    assert not (tmp_path / "headers" / "config.json").exists()


def test_the_folder_must_be_empty(hub: HubServer, tmp_path: Path) -> None:
    hub.add(REPO, TINY)
    (tmp_path / "x").touch()
    with pytest.raises(OutputError, match="not empty"):
        download_headers(REFERENCE, tmp_path, retry=QUICK)
    assert hub.log == []


def test_offline(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(NetworkError, match="HF_HUB_OFFLINE"):
        download_headers(REFERENCE, tmp_path / "headers", retry=QUICK)
    assert hub.log == []


def test_a_moving_branch_cannot_mix_commits(hub: HubServer, tmp_path: Path) -> None:
    newer = tmp_path / "newer"
    shutil.copytree(TINY, newer)
    (newer / "config.json").write_text("{}")
    old = hub.add(REPO, TINY)
    hub.add(REPO, newer)
    hub.faults.move_branch_after = 1
    snapshot = download_headers(REFERENCE, tmp_path / "headers", retry=QUICK)
    assert snapshot.commit == old
    assert (snapshot.folder / "config.json").read_bytes() == (TINY / "config.json").read_bytes()
