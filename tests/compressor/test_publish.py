"""`push`: only what verifies is sent, in one commit, and every remote file is compared with what was signed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cli.invoke import invoke
from hub_server import running_hub
from hub_upload_server import UploadServer
from refusals import refusal
from release_files import contents
from signing_keys import fixed_key
from tiny_releases import KEY, POLICY, SHARDS, flip_byte, sign, signed_release

from memopt.compressor.checkpoint.hub import HubListing, HubReference, RetryPolicy
from memopt.compressor.checkpoint.hub_http import HubClient
from memopt.compressor.hub_release import repository
from memopt.compressor.publish import PushOptions, push_release
from memopt.errors import ContentError, LayoutError, NetworkError, SignatureError, UsageError
from memopt.manifests.policy import policy_for_key

REPO = repository("org/tiny")
QUICK = PushOptions(retry=RetryPolicy(attempts=2, first_wait_s=0.01))
TOKEN = "hf_secret"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[UploadServer]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    # LFS, whose whole protocol the server speaks; one test below takes Xet.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("time.sleep", lambda _: None)
    with running_hub(UploadServer(tmp_path / "hub")) as server:
        assert isinstance(server, UploadServer)
        server.faults.required_token = TOKEN
        server.create("org/tiny")
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def release(tmp_path: Path) -> Path:
    return signed_release(tmp_path / "release", rows=256, num_ranks=2)


def written(hub: UploadServer) -> list[str]:
    """The requests that change something."""
    words = ("/commit/", "/lfs-object/", "/preupload/", "/info/lfs/", "/xet/")
    return [request.path for request in hub.log if any(word in request.path for word in words)]


def test_everything_arrives_in_one_commit(hub: UploadServer, release: Path) -> None:
    before = {path: path.stat() for path in release.rglob("*")}
    result = push_release(release, REPO, POLICY, QUICK)
    assert hub.remote_files("org/tiny").items() >= contents(release).items()
    assert set(hub.remote_files("org/tiny")) - set(contents(release)) == {".gitattributes"}
    assert [made["commit"] for made in hub.commits] == [result.commit]
    assert set(result.sent_files) == set(contents(release))
    assert result.num_files == len(contents(release))
    assert result.size_bytes == result.sent_size_bytes == sum(map(len, contents(release).values()))
    # The folder was only read: no .cache, no new time stamp.
    after = {path: path.stat() for path in release.rglob("*")}
    assert {path: (s.st_mtime_ns, s.st_ino) for path, s in before.items()} == {
        path: (s.st_mtime_ns, s.st_ino) for path, s in after.items()
    }


def test_no_request_but_the_upload(hub: UploadServer, release: Path) -> None:
    push_release(release, REPO, POLICY, QUICK)
    allowed = ("/api/models/org/tiny/", "/org/tiny.git/info/lfs/", "/lfs-object/", "/api/validate-yaml")
    assert all(request.path.startswith(allowed) for request in hub.log)
    assert not any("telemetry" in request.path or "agent" in request.path for request in hub.log)


def test_a_second_push_sends_nothing(hub: UploadServer, release: Path) -> None:
    first = push_release(release, REPO, POLICY, QUICK)
    hub.log.clear()
    again = push_release(release, REPO, POLICY, QUICK)
    assert (again.commit, again.sent_files, again.sent_size_bytes) == (first.commit, (), 0)
    assert written(hub) == []


def test_a_new_release_sends_what_changed(hub: UploadServer, release: Path) -> None:
    push_release(release, REPO, POLICY, QUICK)
    (release / "chat_template.jinja").write_text("{{ corrected }}")
    sign(release, counter=8)
    result = push_release(release, REPO, POLICY, QUICK)
    assert not set(result.sent_files) & set(SHARDS)
    assert "chat_template.jinja" in result.sent_files
    assert hub.remote_files("org/tiny").items() >= contents(release).items()


def test_what_does_not_verify_causes_no_request(hub: UploadServer, release: Path) -> None:
    with refusal(SignatureError, str(release)):
        push_release(release, REPO, policy_for_key(fixed_key(2).public_key), QUICK)
    flip_byte(release / SHARDS[0], -1000)
    with refusal(ContentError, SHARDS[0]):
        push_release(release, REPO, POLICY, QUICK)
    (release / "modeling_x.py").write_text("print()")
    with refusal(LayoutError, "modeling_x.py", "more"):
        push_release(release, REPO, POLICY, QUICK)
    assert hub.log == []


def test_a_cut_transfer_is_tried_again(hub: UploadServer, release: Path) -> None:
    hub.upload_faults.cut_transfers = 1
    push_release(release, REPO, POLICY, QUICK)
    assert hub.remote_files("org/tiny").items() >= contents(release).items()


def test_a_broken_off_push_goes_on(hub: UploadServer, release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One file a batch: what an earlier batch brought is not sent again.
    monkeypatch.setattr("memopt.compressor.hub_upload.BATCH_NUM_FILES", 1)
    hub.faults.status["/commit/"] = (503, "")
    with refusal(NetworkError, "503"):
        push_release(release, REPO, POLICY, QUICK)
    assert hub.commits == []
    stored = set(hub.objects)
    assert len(stored) == 7
    del hub.faults.status["/commit/"]
    hub.log.clear()
    push_release(release, REPO, POLICY, QUICK)
    assert not [request for request in hub.log if "/lfs-object/" in request.path]
    assert hub.remote_files("org/tiny").items() >= contents(release).items()


@pytest.mark.parametrize("name", [SHARDS[1], "config.json", "model.sig", "tp2/rank-1/model-00001-of-00002.safetensors"])
def test_a_wrong_byte_on_the_server_is_named(hub: UploadServer, release: Path, name: str) -> None:
    hub.upload_faults.flip_byte = {name: 5}
    with refusal(ContentError, name, "do not announce"):
        push_release(release, REPO, POLICY, QUICK)


def test_a_file_that_the_server_lost_or_added_is_named(hub: UploadServer, release: Path) -> None:
    hub.upload_faults.lose = {"tokenizer.json"}
    with refusal(LayoutError, "tokenizer.json", "lacks"):
        push_release(release, REPO, POLICY, QUICK)
    hub.upload_faults.lose = set()
    hub.upload_faults.add = {"modeling_x.py": b"print()"}
    with refusal(LayoutError, "modeling_x.py", "the release lacks"):
        push_release(release, REPO, POLICY, QUICK)


def test_extra_remote_files_are_named_before_anything_is_sent(hub: UploadServer, release: Path) -> None:
    hub.create("org/tiny", "old", {"model-00003-of-00003.safetensors": b"stale", "old/x.py": b"x"})
    old = repository("org/tiny@old")
    with refusal(LayoutError, "model-00003-of-00003.safetensors, old/x.py", "--delete-extra"):
        push_release(release, old, POLICY, QUICK)
    assert written(hub) == []
    result = push_release(release, old, POLICY, replace(QUICK, delete_extra=True))
    assert result.deleted_files == ("model-00003-of-00003.safetensors", "old/x.py")
    assert set(hub.remote_files("org/tiny", "old")) - set(contents(release)) == {".gitattributes"}


def test_a_file_that_changes_after_the_verification_is_not_committed(
    hub: UploadServer, release: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memopt.compressor import publish

    listed = publish.list_files

    def list_and_change(client: HubClient, reference: HubReference) -> HubListing:
        flip_byte(release / SHARDS[1], -1)
        return listed(client, reference)

    # Large enough to be hashed while it is sent, then small enough to be read whole.
    for limit in (1000, 10 * 2**20):
        monkeypatch.setattr("memopt.compressor.local_release.WHOLE_FILE_SIZE_BYTES", limit)
        shutil.rmtree(release)
        signed_release(release, rows=256)
        with monkeypatch.context() as patch:
            patch.setattr(publish, "list_files", list_and_change)
            with refusal(ContentError, SHARDS[1], "changed after it was verified"):
                push_release(release, REPO, POLICY, QUICK)
    assert hub.commits == []


def test_somebody_else_commits_meanwhile(hub: UploadServer, release: Path) -> None:
    hub.upload_faults.moved_branch = True
    with refusal(NetworkError, "somebody else", "412"):
        push_release(release, REPO, POLICY, QUICK)
    assert hub.commits == []


def test_no_access(hub: UploadServer, release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with refusal(UsageError, "org/tiny", "401"):
        push_release(release, REPO, POLICY, QUICK)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    # A token that may read and not write.
    hub.faults.status["/preupload/"] = (403, "")
    with refusal(UsageError, "may not write", "403"):
        push_release(release, REPO, POLICY, QUICK)
    with refusal(UsageError, "org/absent", "401"):
        push_release(release, repository("org/absent"), POLICY, QUICK)
    assert hub.commits == []


def test_a_commit_is_no_branch(hub: UploadServer, release: Path) -> None:
    commit = hub.find_commit("org/tiny", "main")
    with refusal(UsageError, "names a commit"):
        push_release(release, repository(f"org/tiny@{commit}"), POLICY, QUICK)


def test_offline_means_offline(hub: UploadServer, release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with refusal(NetworkError, "HF_HUB_OFFLINE"):
        push_release(release, REPO, POLICY, QUICK)
    assert hub.log == []


def test_xet_sends_the_same_bytes(
    hub: UploadServer, release: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", False)
    monkeypatch.setattr("memopt.compressor.local_release.WHOLE_FILE_SIZE_BYTES", 1000)
    monkeypatch.setenv("HF_XET_CACHE", str(tmp_path / "xet"))
    hub.known = release
    push_release(release, REPO, POLICY, QUICK)
    assert hub.remote_files("org/tiny").items() >= contents(release).items()
    assert hub.xet_bytes > 0
    assert not any("lfs" in request.path or "telemetry" in request.path for request in hub.log)
    assert os.environ.get("HF_HUB_DISABLE_TELEMETRY") is None


def test_the_command(hub: UploadServer, release: Path, tmp_path: Path) -> None:
    key = tmp_path / "release.pub"
    key.write_bytes(KEY.public_key.pem)
    done = invoke("push", release, "org/tiny", "--key", key, "--json")
    assert (done.code, done.verdict["status"]) == (0, "ok"), done.stderr
    assert done.verdict["commit"] == hub.find_commit("org/tiny", "main")
    assert TOKEN not in done.stdout + done.stderr
    done = invoke("push", release, "hf://org/tiny@main", "--key", key)
    assert (done.code, "sent        nothing" in done.stdout) == (0, True), done.stderr
    assert invoke("push", release, "org/tiny").code == 2
    assert invoke("push", release, "org tiny", "--key", key).code == 2
    flip_byte(release / "config.json", 3)
    done = invoke("push", release, "org/tiny", "--key", key, "--json")
    assert (done.code, done.verdict["file"]) == (4, "config.json")
