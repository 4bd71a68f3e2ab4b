"""Downloading a snapshot from an honest Hub: the right files, at one commit, verified and kept."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from memopt.compressor.checkpoint.hub import (
    HubProgress,
    HubReference,
    RetryPolicy,
    download_snapshot,
    resolve,
    verify_unchanged,
)
from memopt.errors import (
    DiskFullError,
    MissingFileError,
    NetworkError,
    SourceChangedError,
    UnsupportedError,
    UsageError,
)

sys.path.insert(0, str(Path(__file__).parents[2]))
from hub_server import HubServer, running_hub

TINY = Path(__file__).parents[3] / "examples" / "tiny-glm5-fp8"
REFERENCE = HubReference("zai-org/tiny", "main")
QUICK = RetryPolicy(attempts=3, first_wait_s=0.01, longest_wait_s=0.02)
SHARDS = {f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}
SMALL = {
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with running_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The example checkpoint beside files that memopt must leave alone."""
    folder = tmp_path / "source"
    shutil.copytree(TINY, folder)
    for name in (
        "modeling_glm.py",
        "README.md",
        "pytorch_model.bin",
        "training.pt",
        "logo.png",
        "other.safetensors",
        "x.pkl",
    ):
        (folder / name).write_bytes(b"not wanted: " + name.encode())
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "LICENSE").write_text("MIT")
    return folder


def test_only_needed_files_arrive_unchanged(hub: HubServer, source: Path, tmp_path: Path) -> None:
    commit = hub.add(REFERENCE.repo_id, source)
    snapshot = download_snapshot(REFERENCE, cache_dir=tmp_path / "cache", retry=QUICK)
    wanted = SHARDS | SMALL | {"chat_template.jinja", "LICENSE"}
    assert (snapshot.commit, snapshot.headers_only) == (commit, False)
    assert {file.path for file in snapshot.files} == wanted
    assert hub.requested_files() == wanted
    assert {path.name for path in snapshot.folder.iterdir()} == wanted
    for name in wanted:
        assert (snapshot.folder / name).read_bytes() == (source / name).read_bytes()
    assert [request.path for request in hub.log if "/api/" in request.path] == [
        "/api/models/zai-org/tiny/revision/main?blobs=true"
    ]
    assert all(commit in request.path for request in hub.log if "/api/" not in request.path)
    assert not list((tmp_path / "cache").rglob("*.incomplete"))
    verify_unchanged(snapshot)


def test_a_second_run_downloads_nothing(hub: HubServer, source: Path, tmp_path: Path) -> None:
    hub.add(REFERENCE.repo_id, source)
    first = download_snapshot(REFERENCE, cache_dir=tmp_path / "cache", retry=QUICK)
    hub.log.clear()
    assert download_snapshot(REFERENCE, cache_dir=tmp_path / "cache", retry=QUICK) == first
    assert hub.requested_files() == set()


def test_the_cache_is_shared_with_huggingface_hub(
    hub: HubServer, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import hf_hub_download

    # Else it asks huggingface.co, not this server, for a list of agents to name in its headers.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
    commit = hub.add(REFERENCE.repo_id, source)
    cache = tmp_path / "cache"
    theirs = hf_hub_download(
        REFERENCE.repo_id, "config.json", revision=commit, cache_dir=cache, endpoint=hub.url, token=False
    )
    hub.log.clear()
    snapshot = download_snapshot(REFERENCE, cache_dir=cache, retry=QUICK)
    assert "config.json" not in hub.requested_files()
    assert Path(theirs) == snapshot.folder / "config.json"
    hub.log.clear()
    shard = min(SHARDS)
    ours = hf_hub_download(REFERENCE.repo_id, shard, revision=commit, cache_dir=cache, endpoint=hub.url, token=False)
    assert hub.log == []
    assert Path(ours) == snapshot.folder / shard


def test_code_comes_only_when_it_is_allowed(hub: HubServer, source: Path, tmp_path: Path) -> None:
    hub.add(REFERENCE.repo_id, source)
    snapshot = download_snapshot(REFERENCE, cache_dir=tmp_path / "cache", allow_code=True, retry=QUICK)
    wanted = SHARDS | SMALL | {"chat_template.jinja", "LICENSE", "modeling_glm.py"}
    assert {file.path for file in snapshot.files} == wanted
    assert (snapshot.folder / "modeling_glm.py").read_bytes() == (source / "modeling_glm.py").read_bytes()


def test_a_listing_that_was_resolved_before_is_not_asked_for_again(
    hub: HubServer, source: Path, tmp_path: Path
) -> None:
    commit = hub.add(REFERENCE.repo_id, source)
    listing = resolve(REFERENCE, retry=QUICK)
    (source / "LICENSE").write_text("other")
    newer = tmp_path / "newer"
    shutil.copytree(source, newer)
    (source / "LICENSE").write_text("MIT")
    assert hub.add(REFERENCE.repo_id, newer) != commit
    snapshot = download_snapshot(REFERENCE, cache_dir=tmp_path / "cache", listing=listing, retry=QUICK)
    assert snapshot.commit == commit
    assert (snapshot.folder / "LICENSE").read_text() == "MIT"


def test_space_for_the_release_is_kept_free(hub: HubServer, source: Path, tmp_path: Path) -> None:
    hub.add(REFERENCE.repo_id, source)
    with pytest.raises(DiskFullError, match=f"{2**60:,} to write for the release"):
        download_snapshot(REFERENCE, cache_dir=tmp_path / "cache", keep_free_bytes=2**60, retry=QUICK)
    assert hub.requested_files() == set()


def test_a_checkpoint_of_one_file(hub: HubServer, tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    hub.add(REFERENCE.repo_id, folder)
    snapshot = download_snapshot(REFERENCE, cache_dir=tmp_path / "cache", retry=QUICK)
    assert [file.path for file in snapshot.files] == ["config.json", "model.safetensors"]


def test_files_of_equal_content_are_fetched_once(hub: HubServer, source: Path, tmp_path: Path) -> None:
    (source / "NOTICE").write_text("MIT")
    hub.add(REFERENCE.repo_id, source)
    snapshot = download_snapshot(REFERENCE, cache_dir=tmp_path / "cache", retry=QUICK)
    assert len(hub.requested_files() & {"NOTICE", "LICENSE"}) == 1
    assert (snapshot.folder / "NOTICE").read_text() == (snapshot.folder / "LICENSE").read_text() == "MIT"


def test_progress_ends_complete(hub: HubServer, source: Path, tmp_path: Path) -> None:
    hub.add(REFERENCE.repo_id, source)
    seen: list[HubProgress] = []
    snapshot = download_snapshot(REFERENCE, cache_dir=tmp_path / "cache", progress=seen.append, retry=QUICK)
    for stage in ("download", "verify"):
        reports = [report for report in seen if report.stage == stage]
        for file in snapshot.files:
            assert max(r.file_done_bytes for r in reports if r.file == file.path) == file.size_bytes
        weights = [report for report in reports if report.file in SHARDS]
        assert weights[-1].total_done_bytes == weights[-1].total_size_bytes > 13_000_000


def test_a_moving_branch_cannot_mix_commits(hub: HubServer, source: Path, tmp_path: Path) -> None:
    newer = tmp_path / "newer"
    shutil.copytree(source, newer)
    (newer / "tokenizer_config.json").write_text('{"newer": true}')
    old, new = hub.add(REFERENCE.repo_id, source), hub.add(REFERENCE.repo_id, newer)
    hub.faults.move_branch_after = 1
    snapshot = download_snapshot(REFERENCE, cache_dir=tmp_path / "cache", retry=QUICK)
    assert snapshot.commit == old
    name = "tokenizer_config.json"
    assert (snapshot.folder / name).read_bytes() == (source / name).read_bytes()
    later = download_snapshot(REFERENCE, cache_dir=tmp_path / "cache", retry=QUICK)
    assert later.commit == new
    assert (later.folder / name).read_text() == '{"newer": true}'


def test_a_commit_as_revision(hub: HubServer, source: Path) -> None:
    commit = hub.add(REFERENCE.repo_id, source)
    assert resolve(HubReference(REFERENCE.repo_id, commit), retry=QUICK).commit == commit


def test_verify_unchanged_notices_every_change(hub: HubServer, source: Path, tmp_path: Path) -> None:
    hub.add(REFERENCE.repo_id, source)
    snapshot = download_snapshot(REFERENCE, cache_dir=tmp_path / "cache", retry=QUICK)
    shard = (snapshot.folder / min(SHARDS)).resolve()
    raw = shard.read_bytes()
    status = shard.stat()
    shard.write_bytes(raw[:-1] + b"\0")
    with pytest.raises(SourceChangedError, match=min(SHARDS)):
        verify_unchanged(snapshot)
    shard.write_bytes(raw)
    # The time of modification can be set back, that of the last change cannot.
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(SourceChangedError, match=min(SHARDS)):
        verify_unchanged(snapshot)
    snapshot = download_snapshot(REFERENCE, cache_dir=tmp_path / "cache", retry=QUICK)
    twin = shard.with_name("twin")
    shutil.copy2(shard, twin)
    twin.replace(shard)
    with pytest.raises(SourceChangedError, match="changed after it was verified"):
        verify_unchanged(snapshot)
    shard.unlink()
    with pytest.raises(SourceChangedError, match="removed"):
        verify_unchanged(snapshot)


def test_offline_uses_the_cache_alone(
    hub: HubServer, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(REFERENCE.repo_id, source)
    cache = tmp_path / "cache"
    online = download_snapshot(REFERENCE, cache_dir=cache, retry=QUICK)
    hub.log.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    offline = download_snapshot(REFERENCE, cache_dir=cache, retry=QUICK)
    assert (offline.commit, offline.folder, offline.verified) == (online.commit, online.folder, online.verified)
    assert [file.path for file in offline.files] == [file.path for file in online.files]
    by_commit = download_snapshot(HubReference(REFERENCE.repo_id, online.commit), cache_dir=cache, retry=QUICK)
    assert by_commit.verified == online.verified
    with pytest.raises(NetworkError, match="HF_HUB_OFFLINE"):
        download_snapshot(HubReference(REFERENCE.repo_id, "v2"), cache_dir=cache)
    shard = (online.folder / min(SHARDS)).resolve()
    raw = bytearray(shard.read_bytes())
    raw[5000] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(SourceChangedError, match=min(SHARDS)):
        download_snapshot(REFERENCE, cache_dir=cache)
    with pytest.raises(MissingFileError, match="not in the cache"):
        download_snapshot(REFERENCE, cache_dir=cache)
    assert hub.log == []


def test_offline_knows_what_the_repository_holds_beside(
    hub: HubServer, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "figures").mkdir()
    (source / "figures" / "a.png").write_bytes(b"png")
    hub.add(REFERENCE.repo_id, source)
    online = download_snapshot(REFERENCE, cache_dir=tmp_path / "cache", retry=QUICK)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    offline = download_snapshot(REFERENCE, cache_dir=tmp_path / "cache", retry=QUICK)
    assert offline.listing.top == online.listing.top
    assert {"figures/", "logo.png", "modeling_glm.py"} <= {file.name for file in offline.listing.top}
    # What was not fetched is missed, not left out quietly.
    with pytest.raises(MissingFileError, match=r"modeling_glm\.py .*not in the cache"):
        download_snapshot(REFERENCE, cache_dir=tmp_path / "cache", allow_code=True, retry=QUICK)


def test_no_safetensors(hub: HubServer, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    hub.add(REFERENCE.repo_id, folder)
    with pytest.raises(UnsupportedError, match="neither"):
        download_snapshot(REFERENCE, cache_dir=tmp_path / "cache", retry=QUICK)
    assert "pytorch_model.bin" not in hub.requested_files()


@pytest.mark.parametrize("endpoint", ["ftp://x", "127.0.0.1:80", "http://", "http://user:pw@host", "http://h:99999"])
def test_malformed_endpoint(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(UsageError, match="HF_ENDPOINT") as caught:
        resolve(REFERENCE)
    assert "pw" not in str(caught.value)
