"""`pull`: signatures first, the listed files and no others, one commit, and DEST appears only when it verifies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli.invoke import command, invoke
from hub_server import Cut, HubServer, commit_of, running_hub
from refusals import refusal, within_seconds
from release_files import contents, policy_json
from signing_keys import fixed_key
from tiny_releases import IDENTITY, KEY, NOW, POLICY, SHARDS, flip_byte, sign, signed_release

from memopt.compressor.checkpoint.hub import HubProgress, RetryPolicy
from memopt.compressor.fetch_release import PullOptions, PullResult, pull_release
from memopt.compressor.hub_release import repository
from memopt.compressor.partial_release import PartialRelease
from memopt.errors import (
    BundleError,
    ContentError,
    DiskFullError,
    MalformedError,
    MissingFileError,
    NetworkError,
    OutputError,
    PolicyError,
    SignatureError,
    UnsignedError,
    UsageError,
)
from memopt.manifests.policy import parse_policy, policy_for_key
from memopt.manifests.verify import VerifyOptions

REPO = repository("org/tiny")
QUICK = PullOptions(retry=RetryPolicy(attempts=2, first_wait_s=0.01), verify=VerifyOptions(now=NOW, jobs=1), workers=1)
SHARD = SHARDS[1]
RANK_SHARD = f"tp2/rank-1/{SHARD}"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with running_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def release(tmp_path: Path) -> Path:
    return signed_release(tmp_path / "release", rows=256, num_ranks=2)


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    return tmp_path / "models" / "tiny"


def pull(dest: Path) -> PullResult:
    return pull_release(REPO, dest, POLICY, QUICK)


def tree(dest: Path) -> Path:
    return PartialRelease(dest).tree


def nothing_looks_complete(dest: Path) -> bool:
    return not dest.exists()


def test_a_release_arrives_whole(hub: HubServer, release: Path, dest: Path) -> None:
    commit = hub.add("org/tiny", release)
    seen: list[HubProgress] = []
    result = pull_release(REPO, dest, POLICY, QUICK, seen.append)
    assert contents(dest) == contents(release)
    assert (result.commit, result.identity, result.counter, result.left_out) == (commit, IDENTITY, 7, ())
    assert result.num_files == len(contents(release))
    assert result.size_bytes == sum(map(len, contents(release).values()))
    assert sorted(path.name for path in dest.parent.iterdir()) == ["tiny"]
    assert all(commit in request.path for request in hub.log if "/api/" not in request.path)
    assert seen[-1].total_done_bytes <= seen[-1].total_size_bytes


def test_signature_and_manifest_come_first(hub: HubServer, release: Path, dest: Path) -> None:
    hub.add("org/tiny", release)
    pull(dest)
    files = [request.file for request in hub.log if "/api/" not in request.path]
    assert files[:2] == ["model.sig", "memopt.manifest.json"]
    assert files.count("memopt.manifest.json") == 1


def test_files_that_the_release_does_not_list_stay_there(hub: HubServer, release: Path, dest: Path) -> None:
    for name in (".gitattributes", "modeling_x.py", "tp2/rank-0/extra.bin"):
        (release / name).write_bytes(b"not signed")
    hub.add("org/tiny", release)
    result = pull(dest)
    assert result.left_out == ("modeling_x.py", "tp2/rank-0/extra.bin")
    assert set(contents(release)) - set(contents(dest)) == {".gitattributes", *result.left_out}
    assert not {"modeling_x.py", "extra.bin"} & hub.requested_files()


def test_an_untrusted_release_costs_one_small_file(hub: HubServer, release: Path, dest: Path) -> None:
    hub.add("org/tiny", release)
    with refusal(SignatureError):
        pull_release(REPO, dest, policy_for_key(fixed_key(2).public_key), QUICK)
    assert hub.requested_files() == {"model.sig"}
    assert list(dest.parent.iterdir()) == []


@pytest.mark.parametrize(
    "changes",
    [{"identity": "another/model"}, {"min_counters": {IDENTITY: 8}}, {"max_age_seconds": 10}],
    ids=["identity", "rollback", "age"],
)
def test_the_policy_is_asked_before_the_weights_come(
    hub: HubServer, release: Path, dest: Path, changes: dict[str, object]
) -> None:
    hub.add("org/tiny", release)
    policy = parse_policy(policy_json(**changes).encode())
    with refusal(PolicyError):
        pull_release(REPO, dest, policy, QUICK)
    assert hub.requested_files() == {"model.sig", "memopt.manifest.json"}
    assert nothing_looks_complete(dest)


def test_an_unsigned_repository(hub: HubServer, release: Path, dest: Path) -> None:
    (release / "model.sig").unlink()
    hub.add("org/tiny", release)
    with refusal(UnsignedError, "model.sig", "not signed"):
        pull(dest)
    assert hub.requested_files() == set()


def test_a_cut_connection_is_continued(hub: HubServer, release: Path, dest: Path) -> None:
    hub.add("org/tiny", release)
    hub.faults.cut[SHARD] = Cut(20_000)
    pull(dest)
    ranges = [request.range for request in hub.log if request.file == SHARD and "/storage/" in request.path]
    assert any(text and text.startswith("bytes=20000-") for text in ranges), ranges
    assert contents(dest) == contents(release)


def test_a_broken_off_pull_goes_on(hub: HubServer, release: Path, dest: Path) -> None:
    hub.add("org/tiny", release)
    hub.faults.cut[RANK_SHARD] = Cut(20_000, times=-1)
    with refusal(NetworkError, RANK_SHARD, "run the same command again"):
        pull(dest)
    assert nothing_looks_complete(dest)
    assert (tree(dest) / RANK_SHARD).stat().st_size == 20_000
    done = {name for name, raw in contents(tree(dest)).items() if contents(release)[name] == raw}
    assert len(done) > 3
    hub.faults.cut.clear()
    hub.log.clear()
    pull(dest)
    assert contents(dest) == contents(release)
    again = {request.path.partition("/storage/")[2] for request in hub.log if "/storage/" in request.path}
    assert not {name for name in done if any(path.endswith("/" + name) for path in again) and "/" in name}
    assert [r.range for r in hub.log if r.path.endswith(RANK_SHARD) and "/storage/" in r.path] == [
        f"bytes=20000-{(release / RANK_SHARD).stat().st_size - 1}"
    ]
    assert not dest.with_name("tiny.partial").exists()


@pytest.mark.parametrize("name", [SHARD, RANK_SHARD, "chat_template.jinja", "config.json", "memopt.chunks"])
def test_a_wrong_byte_on_the_server(hub: HubServer, release: Path, dest: Path, name: str) -> None:
    hub.add("org/tiny", release)
    hub.faults.flip_byte[name] = 3
    with refusal(ContentError, name):
        pull(dest)
    assert nothing_looks_complete(dest)
    # The bad file is gone, so that an honest server is enough.
    assert not (tree(dest) / name).exists()
    hub.faults.flip_byte.clear()
    hub.log.clear()
    pull(dest)
    assert contents(dest) == contents(release)
    assert {request.file for request in hub.log if "/storage/" in request.path} <= {Path(name).name}


def test_a_wrong_byte_in_signature_and_manifest(hub: HubServer, release: Path, dest: Path) -> None:
    hub.add("org/tiny", release)
    hub.faults.flip_byte["model.sig"] = 3
    with pytest.raises((BundleError, SignatureError)):
        pull(dest)
    hub.faults.flip_byte = {"memopt.manifest.json": 3}
    with refusal(ContentError, "memopt.manifest.json"):
        pull(dest)
    assert nothing_looks_complete(dest)


def test_a_digest_that_the_hub_publishes_wrongly_stops_before_the_weights(
    hub: HubServer, release: Path, dest: Path
) -> None:
    flip_byte(release / SHARD, -1)
    hub.add("org/tiny", release)
    with refusal(ContentError, SHARD, "differs from what was signed"):
        pull(dest)
    assert hub.requested_files() == {"model.sig", "memopt.manifest.json"}


def test_another_size_stops_before_the_weights(hub: HubServer, release: Path, dest: Path) -> None:
    hub.add("org/tiny", release)
    hub.faults.claimed_size["ledger.jsonl"] = 2**50
    with refusal(ContentError, "ledger.jsonl"):
        pull(dest)
    hub.faults.claimed_size = {"SHA256SUMS": 2**50}
    with pytest.raises(MalformedError, match="SHA256SUMS"):
        pull(dest)
    hub.faults.claimed_size = {"model.sig": 2**50}
    with refusal(BundleError, "model.sig"):
        pull(dest)


def test_a_missing_remote_file(hub: HubServer, release: Path, dest: Path) -> None:
    (release / RANK_SHARD).unlink()
    hub.add("org/tiny", release)
    with refusal(MissingFileError, RANK_SHARD):
        pull(dest)
    assert hub.requested_files() == {"model.sig", "memopt.manifest.json"}


def test_a_moving_branch_mixes_nothing(hub: HubServer, release: Path, dest: Path, tmp_path: Path) -> None:
    first = hub.add("org/tiny", release)
    hub.faults.cut[RANK_SHARD] = Cut(20_000, times=-1)
    with refusal(NetworkError, RANK_SHARD):
        pull(dest)
    newer = tmp_path / "newer"
    shutil.copytree(release, newer)
    (newer / "chat_template.jinja").write_text("{{ newer }}")
    sign(newer, counter=8)
    second = hub.add("org/tiny", newer)
    assert first != second
    hub.faults.cut.clear()
    hub.log.clear()
    result = pull(dest)
    assert (result.commit, result.counter) == (second, 8)
    assert contents(dest) == contents(newer)
    # What is the same in both was kept.
    assert not [r for r in hub.log if r.path.endswith(f"/{SHARDS[0]}") and "/tp2/" not in r.path]


def test_one_commit_by_its_name(hub: HubServer, release: Path, dest: Path, tmp_path: Path) -> None:
    commit = hub.add("org/tiny", release)
    newer = tmp_path / "newer"
    shutil.copytree(release, newer)
    sign(newer, counter=8)
    hub.add("org/tiny", newer)
    assert pull_release(repository(f"org/tiny@{commit}"), dest, POLICY, QUICK).counter == 7


def test_planted_files_do_not_survive(hub: HubServer, release: Path, dest: Path) -> None:
    hub.add("org/tiny", release)
    planted = tree(dest)
    (planted / "tp2").mkdir(parents=True)
    (planted / "evil.py").write_text("print()")
    (planted / "config.json").write_text("{}")
    (planted / "tp2" / "rank-0").symlink_to(dest.parent)
    (planted / SHARD).symlink_to("/etc/hostname")
    os.mkfifo(planted / "tokenizer.json")
    pull(dest)
    assert contents(dest) == contents(release)
    assert not (dest.parent / SHARD).exists()


def test_dest_must_be_free(hub: HubServer, release: Path, dest: Path) -> None:
    hub.add("org/tiny", release)
    dest.mkdir(parents=True)
    (dest / "mine").write_text("keep")
    with refusal(OutputError, "not empty"):
        pull(dest)
    (dest / "mine").unlink()
    pull(dest)
    assert contents(dest) == contents(release)
    with refusal(OutputError, "not empty"):
        pull(dest)
    link = dest.with_name("link")
    link.symlink_to(dest)
    with refusal(OutputError):
        pull(link)


def test_one_pull_at_a_time(hub: HubServer, release: Path, dest: Path) -> None:
    hub.add("org/tiny", release)
    with PartialRelease(dest).locked():
        with refusal(OutputError, "another pull"):
            pull(dest)
        assert PartialRelease(dest).root.exists()
    pull(dest)


def test_no_space(hub: HubServer, release: Path, dest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/tiny", release)
    usage = shutil.disk_usage(dest.parent.parent)._replace(free=1000)
    monkeypatch.setattr("memopt.compressor.partial_release.shutil.disk_usage", lambda _: usage)
    with refusal(DiskFullError, "1,000 free"):
        pull(dest)


def test_no_access(hub: HubServer, release: Path, dest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/tiny", release)
    hub.faults.required_token = "hf_right"
    with refusal(UsageError, "org/tiny", "401", "HF_TOKEN"):
        pull(dest)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with refusal(UsageError, "org/tiny", "401"):
        pull(dest)
    assert not dest.parent.exists()
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    pull(dest)
    # Storage behind the redirect gets no token.
    assert not any(request.has_token for request in hub.log if "/storage/" in request.path)


def test_offline_means_offline(hub: HubServer, dest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with refusal(NetworkError, "HF_HUB_OFFLINE"):
        pull(dest)
    assert hub.log == []


def test_a_stopped_pull_leaves_no_release(hub: HubServer, release: Path, dest: Path, tmp_path: Path) -> None:
    sign(release, created=None)
    hub.add("org/tiny", release)
    key = tmp_path / "release.pub"
    key.write_bytes(KEY.public_key.pem)
    hub.faults.seconds_per_chunk = 0.2
    arguments = command("pull", "org/tiny", dest, "--key", key, "--workers", "1")
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        with within_seconds(60):
            while not any((tree(dest) / name).exists() for name in (*SHARDS, RANK_SHARD)):
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            out, error = process.communicate()
    finally:
        process.kill()
    assert (process.returncode, out) == (143, ""), error
    assert "run the same command again" in error
    assert nothing_looks_complete(dest)
    hub.faults.seconds_per_chunk = 0.0
    assert invoke("pull", "org/tiny", dest, "--key", key).code == 0
    assert contents(dest) == contents(release)


def test_the_command(hub: HubServer, release: Path, dest: Path, tmp_path: Path) -> None:
    sign(release, created=None)
    commit = hub.add("org/tiny", release)
    assert commit == commit_of(release)
    policy = tmp_path / "trust.json"
    policy.write_text(policy_json(identity=IDENTITY))
    done = invoke("pull", "org/tiny", dest, "--policy", policy, "--json")
    assert (done.code, done.verdict["status"], done.verdict["commit"]) == (0, "ok", commit), done.stderr
    assert invoke("verify", dest, "--policy", policy).code == 0
    shutil.rmtree(dest)
    done = invoke("pull", f"org/tiny@{commit}", dest, "--policy", policy)
    assert (done.code, f"commit      {commit}" in done.stdout) == (0, True), done.stderr
    assert invoke("pull", "org/tiny", dest).code == 2
    policy.write_text(policy_json(fixed_key(2)))
    done = invoke("pull", "org/tiny", tmp_path / "other", "--policy", policy, "--json")
    assert (done.code, done.verdict["code"]) == (3, "MEMOPT_SIGNATURE")
    assert not (tmp_path / "other").exists()
    policy.write_text(json.dumps({"schema": "memopt.trust/1"}))
    assert invoke("pull", "org/tiny", tmp_path / "other", "--policy", policy).code != 0
