"""Compressing a Hub repository: refused before its weights are fetched, and made of its verified files alone."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli.invoke import command
from faults.small_source import FLAGS, OPTIONS, compress, make_small_source
from faults.trees import tree
from hub_server import HubServer, running_hub
from refusals import refusal

import memopt
from memopt.compressor import source as source_module
from memopt.compressor.checkpoint.hub import HubReference, resolve
from memopt.compressor.fingerprint import plan_fingerprint
from memopt.compressor.preflight import Preflight
from memopt.errors import (
    AlignmentError,
    DiskFullError,
    InterruptedRunError,
    OutputError,
    RecipeError,
    SourceChangedError,
    UnsupportedError,
    UsageError,
)

REPOSITORY = "zai-org/tiny"
NAME = f"{REPOSITORY}@main"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = make_small_source(tmp_path / "source")
    (folder / "README.md").write_text("# card")
    (folder / "tiktoken.model").write_bytes(b"\x00tokens")
    (folder / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["tokenization_x.X", null]}}')
    (folder / "tokenization_x.py").write_text("print('never run')\n")
    (folder / "figures").mkdir()
    (folder / "figures" / "a.png").write_bytes(b"png")
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: Path) -> Iterator[HubServer]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    # A name is a repository only where no such path exists.
    monkeypatch.chdir(tmp_path)
    with running_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        server.add(REPOSITORY, source)
        yield server


def _compress(out: Path, **options: Any) -> memopt.RunResult:
    return memopt.compress(NAME, out, **{"options": OPTIONS, "workers": 1, "device": "cpu", **options})


def _fetched_shards(hub: HubServer, source: Path) -> list[str]:
    shards = {path.name: path.stat().st_size for path in source.glob("*.safetensors")}
    return [name for name, size in shards.items() if hub.sent_bytes(name) >= size]


def _snapshot(tmp_path: Path) -> Path:
    return next((tmp_path / "cache").glob("models--*/snapshots/*"))


def _release(out: Path) -> dict[str, Any]:
    table: dict[str, Any] = json.loads((out / "release.json").read_text())
    return table


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (RecipeError, {"recipe": "glm-5.2-int44"}),
        (RecipeError, {"recipe": "kimi-k2-int4"}),
        (UsageError, {"workers": 0}),
        (AlignmentError, {"options": replace(OPTIONS, tensor_parallel=7)}),
        (UsageError, {"options": replace(OPTIONS, max_file_bytes=0)}),
    ],
)
def test_a_wrong_call_is_refused_before_the_weights_are_fetched(
    error: type[UsageError], options: dict[str, Any], hub: HubServer, source: Path, tmp_path: Path
) -> None:
    with refusal(error):
        _compress(tmp_path / "out", **options)
    assert _fetched_shards(hub, source) == []
    assert not (tmp_path / "out").exists()


def test_an_output_folder_that_cannot_be_used_is_refused_before_the_weights_are_fetched(
    hub: HubServer, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "x").write_text("x")
    with refusal(OutputError, "not empty", "'x'"):
        _compress(taken)
    with refusal(OutputError, "inside"):
        _compress(tmp_path)
    with refusal(OutputError, "inside the source"):
        _compress(tmp_path / "cache" / "models--zai-org--tiny" / "out")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
        with refusal(DiskFullError, "1,000 are free"):
            _compress(tmp_path / "out")
    assert _fetched_shards(hub, source) == []


def test_a_model_of_another_family_is_refused_before_its_weights_are_fetched(
    hub: HubServer, source: Path, tmp_path: Path
) -> None:
    (source / "config.json").write_text('{"model_type": "llama"}')
    hub.add(REPOSITORY, source)
    with refusal(UnsupportedError, "llama"):
        _compress(tmp_path / "out")
    assert _fetched_shards(hub, source) == []


def test_the_plan_from_headers_is_the_plan_that_is_run(hub: HubServer, tmp_path: Path) -> None:
    planned = memopt.plan(NAME, options=OPTIONS)
    _compress(tmp_path / "out")
    assert _release(tmp_path / "out")["identity"]["plan_fingerprint"] == plan_fingerprint(planned)
    assert len([request for request in hub.log if "/api/" in request.path]) == 2, "one listing a call"


def test_headers_that_differ_from_the_files_are_refused(hub: HubServer) -> None:
    planned = memopt.plan(NAME, options=OPTIONS)
    found = resolve(HubReference(REPOSITORY, "main"))
    Preflight(plan_fingerprint(planned), found, 0).require_same(planned)
    with refusal(SourceChangedError, NAME, "headers"):
        Preflight("0" * 64, found, 0).require_same(planned)


def test_a_branch_that_moves_meanwhile_does_not_matter(hub: HubServer, source: Path, tmp_path: Path) -> None:
    newer = make_small_source(tmp_path / "newer")
    commit = memopt.inspect(NAME).commit
    hub.add(REPOSITORY, newer)
    hub.faults.move_branch_after = 2
    _compress(tmp_path / "out")
    assert _release(tmp_path / "out")["source"]["commit"] == commit


def test_offline_goes_on_with_what_was_begun_online(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _compress(tmp_path / "out")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.log.clear()
    assert _compress(tmp_path / "out").was_complete
    assert hub.log == []


def test_what_others_left_in_the_cache_does_not_count(hub: HubServer, source: Path, tmp_path: Path) -> None:
    _compress(tmp_path / "clean")
    folder = _snapshot(tmp_path)
    (folder / "README.md").write_text("# card")
    (folder / "tokenizer_evil.json").write_text("{}")
    (folder / "modeling_evil.py").write_text("evil")
    (folder / "consolidated.safetensors").write_bytes(b"no weights")
    (folder / "figures").mkdir()
    (folder / "tiktoken.model").unlink()
    (folder / "tiktoken.model").write_bytes(b"not the publisher's")
    _compress(tmp_path / "stray")
    assert tree(tmp_path / "stray") == tree(tmp_path / "clean")
    assert (tmp_path / "stray" / "tiktoken.model").read_bytes() == b"\x00tokens"
    assert _compress(tmp_path / "clean").was_complete


@pytest.mark.parametrize("allow_code", [False, True])
def test_a_repository_and_its_folder_give_the_same_release(
    allow_code: bool, hub: HubServer, source: Path, tmp_path: Path
) -> None:
    options = replace(OPTIONS, allow_code=allow_code)
    compress(source, tmp_path / "folder", options=options)
    _compress(tmp_path / "hub", options=options)
    here, there = tree(tmp_path / "folder"), tree(tmp_path / "hub")
    assert {name for name in {*here, *there} if here.get(name) != there.get(name)} == {"release.json"}
    local, remote = _release(tmp_path / "folder"), _release(tmp_path / "hub")
    for key in ("code_files", "not_copied", "engine_notes"):
        assert local[key] == remote[key], key
    code = ["modeling_custom.py", "tokenization_x.py"]
    assert remote["code_files"] == (code if allow_code else [])
    left = {row["name"]: row["reason"] for row in remote["not_copied"]}
    assert set(left) == {"README.md", "figures/", *(() if allow_code else code)}
    notes = [note["message"] for note in remote["engine_notes"] if note["rule"] == "auto-map"]
    named = "tokenizer_config.json's auto_map names tokenization_x.py"
    assert [named in note for note in notes] == ([] if allow_code else [True])


def test_a_name_that_a_local_folder_hides_is_told_how_to_write(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "zai-org").mkdir()
    for name in (NAME, REPOSITORY):
        for call in (memopt.inspect, memopt.plan, lambda name: memopt.compress(name, tmp_path / "out")):
            with refusal(UsageError, f"there is no checkpoint folder {name}", f"write hf://{name}"):
                call(name)
    assert hub.log == []


def _size_bytes(path: Path) -> int:
    """Of a file that its writer may have renamed since it was listed: then 0."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def test_ctrl_c_while_it_is_fetched(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    hub.faults.seconds_per_chunk = 0.05
    child = subprocess.Popen(
        command("compress", NAME, tmp_path / "out", *FLAGS), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 60
    while child.poll() is None and time.monotonic() < end:
        if any(_size_bytes(path) > 10_000 for path in (tmp_path / "cache").glob("**/*.incomplete")):
            break
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=60)
    assert child.returncode == 130, stderr
    last = stderr.splitlines()[-1]
    assert last.startswith("memopt compress: MEMOPT_INTERRUPTED: ")
    assert "finished files are kept" in last
    assert list((tmp_path / "cache").glob("**/*.incomplete"))


@pytest.mark.parametrize("place", ["download_snapshot", "open_checkpoint"])
def test_ctrl_c_between_download_and_work(
    place: str, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(source_module, place, stop)
    with refusal(InterruptedRunError, NAME, "run the same command again", "finished files are kept"):
        _compress(tmp_path / "out")


def test_ctrl_c_while_it_is_signed(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    monkeypatch.setattr("memopt.manifests.sign.sign_release", stop)
    with refusal(InterruptedRunError, str(out), "its signature is not", "run the same command again"):
        compress(source, out, signers=[object()])
    monkeypatch.undo()
    assert compress(source, out).was_complete
