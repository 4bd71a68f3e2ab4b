"""A Hub that breaks off, refuses or lies: resumed where that is possible, one clear error where it is not."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from memopt.compressor.checkpoint.hub import HubReference, RetryPolicy, download_snapshot, resolve
from memopt.errors import (
    DiskFullError,
    NetworkError,
    SourceChangedError,
    UsageError,
)

sys.path.insert(0, str(Path(__file__).parents[2]))
from hub_server import Cut, HubServer, running_hub

REPO = "zai-org/small"
REFERENCE = HubReference(REPO, "main")
QUICK = RetryPolicy(attempts=3, first_wait_s=0.01, longest_wait_s=0.02)
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
DATA_BYTES = 300_000
CUT = 100_001


def write_shard(path: Path, tensor: str, fill: int) -> None:
    header = json.dumps({tensor: {"dtype": "U8", "shape": [DATA_BYTES], "data_offsets": [0, DATA_BYTES]}}).encode()
    data = hashlib.shake_128(bytes([fill])).digest(DATA_BYTES)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def write_index(folder: Path, **weight_map: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nonexistent/token")
    with running_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "glm_moe_dsa"}')
    write_shard(folder / FIRST, "a", 1)
    write_shard(folder / SECOND, "b", 2)
    write_index(folder, a=FIRST, b=SECOND)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def ranges(hub: HubServer, file: str) -> list[str | None]:
    """The ranges asked for, redirects left out."""
    return [request.range for request in hub.log if request.file == file and request.status in {200, 206}]


def test_a_cut_connection_continues_within_the_call(hub: HubServer, source: Path, cache: Path) -> None:
    hub.add(REPO, source)
    hub.faults.cut[SECOND] = Cut(CUT, times=1)
    snapshot = download_snapshot(REFERENCE, cache_dir=cache, retry=QUICK)
    assert (snapshot.folder / SECOND).read_bytes() == (source / SECOND).read_bytes()
    size = (source / SECOND).stat().st_size
    assert ranges(hub, SECOND) == [None, f"bytes={CUT}-{size - 1}"]
    assert hub.sent_bytes(SECOND) == size


def test_a_cut_connection_continues_in_the_next_call(hub: HubServer, source: Path, cache: Path) -> None:
    hub.add(REPO, source)
    hub.faults.cut[SECOND] = Cut(CUT, times=1000)
    with pytest.raises(NetworkError, match=f"{SECOND}.*gave up after 3 attempts.*100,001") as caught:
        download_snapshot(REFERENCE, cache_dir=cache, retry=QUICK, workers=1)
    assert "run the same command again" in caught.value.remedy
    hub.log.clear()
    hub.faults.cut.clear()
    snapshot = download_snapshot(REFERENCE, cache_dir=cache, retry=QUICK)
    assert (snapshot.folder / SECOND).read_bytes() == (source / SECOND).read_bytes()
    size = (source / SECOND).stat().st_size
    assert hub.requested_files() == {SECOND}
    assert ranges(hub, SECOND) == [f"bytes={CUT}-{size - 1}"]


def test_a_server_without_ranges_starts_again(hub: HubServer, source: Path, cache: Path) -> None:
    hub.add(REPO, source)
    hub.faults.cut[SECOND] = Cut(CUT, times=1)
    hub.faults.ignore_range = True
    snapshot = download_snapshot(REFERENCE, cache_dir=cache, retry=QUICK)
    assert (snapshot.folder / SECOND).read_bytes() == (source / SECOND).read_bytes()


def test_a_cut_listing_is_asked_for_again(hub: HubServer, source: Path, cache: Path) -> None:
    hub.add(REPO, source)
    hub.faults.status["/api/models"] = (503, "")
    hub.faults.status_times["/api/models"] = 2
    assert resolve(REFERENCE, retry=QUICK).find(FIRST) is not None
    hub.faults.status_times["/api/models"] = 5
    with pytest.raises(NetworkError, match="HTTP 503; gave up after 3 attempts"):
        resolve(REFERENCE, retry=QUICK)


def test_an_expired_storage_address_is_asked_for_again(hub: HubServer, source: Path, cache: Path) -> None:
    hub.add(REPO, source)
    hub.faults.status["/storage/"] = (403, "")
    hub.faults.status_times["/storage/"] = 1
    download_snapshot(REFERENCE, cache_dir=cache, retry=QUICK)


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(NetworkError, match=r"zai-org/small@main: cannot connect: .*127\.0\.0\.1:9"):
        resolve(REFERENCE, retry=QUICK)


@pytest.mark.parametrize(("name", "kind"), [(FIRST, "SHA-256"), ("config.json", "git blob SHA-1")])
def test_a_wrong_byte_is_refused_and_fetched_anew(
    hub: HubServer, source: Path, cache: Path, name: str, kind: str
) -> None:
    hub.add(REPO, source)
    hub.faults.flip_byte[name] = 20
    with pytest.raises(SourceChangedError) as caught:
        download_snapshot(REFERENCE, cache_dir=cache, retry=QUICK)
    raw = bytearray((source / name).read_bytes())
    good = hashlib.sha256(raw) if kind == "SHA-256" else hashlib.sha1(b"blob %d\0" % len(raw) + raw)
    raw[20] ^= 1
    bad = hashlib.sha256(raw) if kind == "SHA-256" else hashlib.sha1(b"blob %d\0" % len(raw) + raw)
    for part in (name, kind, good.hexdigest(), bad.hexdigest()):
        assert part in caught.value.message
    assert not list((cache / "models--zai-org--small" / "blobs").glob(f"{good.hexdigest()}*"))
    hub.faults.flip_byte.clear()
    snapshot = download_snapshot(REFERENCE, cache_dir=cache, retry=QUICK)
    assert (snapshot.folder / name).read_bytes() == (source / name).read_bytes()


def test_a_spoilt_cached_file_is_removed_and_fetched_anew(hub: HubServer, source: Path, cache: Path) -> None:
    hub.add(REPO, source)
    shard = (download_snapshot(REFERENCE, cache_dir=cache, retry=QUICK).folder / FIRST).resolve()
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(SourceChangedError, match=f"{FIRST} has .* bytes, the Hub lists"):
        download_snapshot(REFERENCE, cache_dir=cache, retry=QUICK)
    assert not shard.exists()
    snapshot = download_snapshot(REFERENCE, cache_dir=cache, retry=QUICK)
    assert (snapshot.folder / FIRST).read_bytes() == (source / FIRST).read_bytes()


def test_a_spoilt_partial_file_is_removed(hub: HubServer, source: Path, cache: Path) -> None:
    hub.add(REPO, source)
    blobs = cache / "models--zai-org--small" / "blobs"
    blobs.mkdir(parents=True)
    digest = hashlib.sha256((source / FIRST).read_bytes()).hexdigest()
    (blobs / f"{digest}.incomplete").write_bytes(b"\0" * 1000)
    with pytest.raises(SourceChangedError, match=FIRST):
        download_snapshot(REFERENCE, cache_dir=cache, retry=QUICK)
    download_snapshot(REFERENCE, cache_dir=cache, retry=QUICK)


def test_another_size_than_listed_is_refused_before_the_download(hub: HubServer, source: Path, cache: Path) -> None:
    hub.add(REPO, source)
    hub.faults.claimed_size[FIRST] = 1_000_000
    with pytest.raises(SourceChangedError, match="1,000,000"):
        download_snapshot(REFERENCE, cache_dir=cache, retry=QUICK)


def test_the_first_failure_stops_the_other_transfers(hub: HubServer, source: Path, cache: Path) -> None:
    hub.add(REPO, source)
    hub.faults.claimed_size[FIRST] = 1_000_000
    hub.faults.seconds_per_chunk = 0.1
    with pytest.raises(SourceChangedError, match=FIRST):
        download_snapshot(REFERENCE, cache_dir=cache, retry=QUICK)
    # SECOND needs 19 chunks; its part is kept for the next run.
    parts = list((cache / "models--zai-org--small" / "blobs").glob("*.incomplete"))
    assert all(part.stat().st_size < DATA_BYTES / 2 for part in parts)
    hub.faults.claimed_size.clear()
    hub.faults.seconds_per_chunk = 0.0
    download_snapshot(REFERENCE, cache_dir=cache, retry=QUICK)


def test_a_download_that_cannot_fit_is_not_begun(hub: HubServer, source: Path, cache: Path) -> None:
    hub.add(REPO, source)
    hub.faults.claimed_size[FIRST] = 2**60
    with pytest.raises(DiskFullError, match="still to download"):
        download_snapshot(REFERENCE, cache_dir=cache, retry=QUICK)
    assert FIRST not in hub.requested_files()


def refused(revision: str = "main", repo_id: str = REPO) -> UsageError:
    with pytest.raises(UsageError) as caught:
        resolve(HubReference(repo_id, revision), retry=QUICK)
    return caught.value


def test_missing_repository_revision_and_access(hub: HubServer, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(REPO, source)
    assert "does not exist, or this user may not read it (HTTP 401)" in refused(repo_id="zai-org/none").message
    assert "has no revision 'v9'" in refused(revision="v9").message
    hub.faults.status["/api/"] = (404, "RepoNotFound")
    assert "does not exist" in refused().message
    hub.faults.status["/api/"] = (403, "GatedRepo")
    error = refused()
    assert "gated" in error.message
    assert "HF_TOKEN is not set" in error.remedy
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    error = refused()
    assert "the token that was sent gives no access" in error.remedy
    assert "secretsecret" not in str(error)
    assert len(hub.log) == 5


def test_a_private_repository_and_where_the_token_goes(
    hub: HubServer, source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(REPO, source)
    hub.faults.required_token = "hf_secretsecret"
    assert "HTTP 401" in refused().message
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    hub.log.clear()
    download_snapshot(REFERENCE, cache_dir=cache, retry=QUICK)
    assert {request.has_token for request in hub.log if "/storage/" not in request.path} == {True}
    assert {request.has_token for request in hub.log if "/storage/" in request.path} == {False}


def test_a_token_that_no_header_can_carry(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret\x01sécret")
    error = refused()
    assert "secret" not in str(error)
    assert hub.log == []
