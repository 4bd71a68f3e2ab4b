"""SRC: a folder never causes a network call; a Hub id gives the same release but for the source's identity."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.small_source import FLAGS, OPTIONS, compress, edit_tensor, make_small_source
from faults.trees import tree
from hub_server import HubServer, running_hub

import memopt
from memopt.compressor.source import open_source, scanned_source
from memopt.errors import MissingFileError, SourceChangedError, TruncatedError, UsageError

REPOSITORY = "zai-org/tiny"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_small_source(tmp_path / "source")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    # A name without "@" is a path, and must not exist by accident.
    monkeypatch.chdir(tmp_path)
    with running_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a network call")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.usefixtures("no_network")
def test_a_folder_is_opened_without_the_network(source: Path, tmp_path: Path) -> None:
    opened = open_source(source)
    assert (opened.identity.kind, opened.identity.commit, opened.snapshot) == ("folder", None, None)
    opened.require_unchanged()
    assert memopt.inspect(str(source)).repository is None
    compress(source, tmp_path / "out")


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    "name", ["zai-org/GLM-5.2", "no/such/folder", "missing", "/no/such@main", "a b@main", "x" * 300]
)
def test_what_is_not_there_is_named_without_the_network(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (memopt.inspect, memopt.plan, open_source):
        with pytest.raises(UsageError, match="there is no checkpoint folder") as caught:
            call(name)
        assert name in caught.value.message


@pytest.mark.usefixtures("no_network")
def test_half_a_checkpoint_is_not_opened(source: Path) -> None:
    lost, half = sorted(source.glob("*.safetensors"))
    lost.unlink()
    half.write_bytes(half.read_bytes()[:-7])
    with pytest.raises(MissingFileError, match=lost.name) as caught:
        open_source(source)
    assert "more problem" in caught.value.remedy
    with scanned_source(source) as (scan, _):
        assert {type(problem) for problem in scan.problems} >= {MissingFileError, TruncatedError}


def test_a_hub_id_gives_the_same_weights(hub: HubServer, source: Path, tmp_path: Path) -> None:
    commit = hub.add(REPOSITORY, source)
    compress(source, tmp_path / "folder")
    seen: list[tuple[str, str, int, int]] = []
    result = memopt.compress(
        f"{REPOSITORY}@main",
        tmp_path / "hub",
        options=OPTIONS,
        workers=2,
        device="cpu",
        download=lambda *row: seen.append(row),
    )
    here, there = tree(tmp_path / "folder"), tree(tmp_path / "hub")
    assert {name for name in here if here[name] != there.get(name)} <= {"release.json"}
    release = json.loads((tmp_path / "hub" / "release.json").read_text())
    assert (release["source"]["kind"], release["source"]["repository"], release["source"]["commit"]) == (
        "hub",
        REPOSITORY,
        commit,
    )
    assert all(len(file["sha256"]) == 64 for file in release["source"]["files"])
    assert result.total_size_bytes == sum(path.stat().st_size for path in (tmp_path / "hub").iterdir())
    assert seen[-1][2] == seen[-1][3] > 0


def test_a_complete_release_of_a_hub_id_is_a_no_op(hub: HubServer, source: Path, tmp_path: Path) -> None:
    hub.add(REPOSITORY, source)
    for expected in (False, True):
        result = memopt.compress(f"{REPOSITORY}@main", tmp_path / "out", options=OPTIONS, device="cpu")
        assert result.was_complete is expected


def test_headers_alone_are_fetched_to_plan(hub: HubServer, source: Path) -> None:
    commit = hub.add(REPOSITORY, source)
    plan = memopt.plan(f"hf://{REPOSITORY}", options=OPTIONS)
    assert plan.units == memopt.plan(source, options=OPTIONS).units
    assert memopt.inspect(f"hf://{REPOSITORY}").commit == commit
    sizes = {path.name: path.stat().st_size for path in source.glob("*.safetensors")}
    assert all(hub.sent_bytes(name) < size for name, size in sizes.items())


def test_a_cached_file_that_is_touched_while_it_is_read(hub: HubServer, source: Path, tmp_path: Path) -> None:
    hub.add(REPOSITORY, source)
    opened = open_source(f"{REPOSITORY}@main")
    opened.require_unchanged()
    assert opened.checkpoint.folder is not None
    edit_tensor(opened.checkpoint.folder, "model.norm.weight", lambda raw: raw.__setitem__(0, raw[0] ^ 1))
    with pytest.raises(SourceChangedError):
        opened.require_unchanged()


def test_the_command_takes_a_hub_id(hub: HubServer, source: Path, tmp_path: Path) -> None:
    from cli.invoke import invoke

    hub.add(REPOSITORY, source)
    done = invoke("compress", f"{REPOSITORY}@main", tmp_path / "out", *FLAGS, "--json")
    assert (done.code, done.verdict["status"]) == (0, "ok")
    missing = invoke("inspect", "zai-org/absent@main", "--json")
    assert missing.code not in {0, 1}
    assert (missing.verdict["status"], missing.verdict["exit_code"]) == ("refused", missing.code)
