"""Which texts name a Hub repository, and that a local path never reaches the network."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from memopt.compressor.checkpoint.hub import HubReference, parse_hub_reference
from memopt.errors import UsageError

sys.path.insert(0, str(Path(__file__).parents[2]))
from hub_server import HubServer, running_hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with running_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("text", "repo_id", "revision"),
    [
        ("zai-org/GLM-5.2-FP8@main", "zai-org/GLM-5.2-FP8", "main"),
        ("zai-org/GLM-5.2-FP8@" + "0a" * 20, "zai-org/GLM-5.2-FP8", "0a" * 20),
        ("hf://zai-org/GLM-5.2-FP8", "zai-org/GLM-5.2-FP8", "main"),
        ("hf://zai-org/GLM-5.2-FP8@refs/pr/3", "zai-org/GLM-5.2-FP8", "refs/pr/3"),
        ("hf://a/b@v1.0", "a/b", "v1.0"),
    ],
)
def test_hub_ids(text: str, repo_id: str, revision: str) -> None:
    assert parse_hub_reference(text) == HubReference(repo_id, revision)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "zai-org/GLM-5.2-FP8",
        "/models/GLM@main",
        "./zai-org/GLM@main",
        "../zai-org/GLM@main",
        "~/GLM@main",
        "~user/GLM@main",
        ".hidden/GLM@main",
        "GLM@main",
        "a/b/c@main",
        "org/name@",
        "org/name@../main",
        "org/name@a b",
        "org\\name@main",
        "@main",
        "org/..@main",
        "-org/name@main",
        "https://huggingface.co/zai-org/GLM@main",
    ],
)
def test_local_paths(text: str) -> None:
    assert parse_hub_reference(text) is None


def test_what_exists_on_disk_is_local(tmp_path: Path) -> None:
    (tmp_path / "org" / "name@main").mkdir(parents=True)
    assert parse_hub_reference("org/name@main") is None
    assert parse_hub_reference("hf://org/name@main") == HubReference("org/name", "main")


def test_a_typing_error_below_an_existing_folder_is_local(tmp_path: Path) -> None:
    (tmp_path / "org" / "name@main").mkdir(parents=True)
    assert parse_hub_reference("org/nmae@main") is None


def test_a_broken_link_is_local(tmp_path: Path) -> None:
    (tmp_path / "org").symlink_to(tmp_path / "gone")
    assert parse_hub_reference("org/name@main") is None


@pytest.mark.parametrize(
    "text", ["hf://", "hf://name", "hf:///etc/passwd", "hf://a/b/c", "hf://a/b@", "hf://../b@main", "hf://a/b@x..y"]
)
def test_malformed_scheme(text: str) -> None:
    with pytest.raises(UsageError, match="does not name a Hub repository"):
        parse_hub_reference(text)


def test_parsing_never_uses_the_network(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise AssertionError("a socket was opened")

    (tmp_path / "org" / "name@main").mkdir(parents=True)
    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for text in (str(tmp_path), "org/name@main", "./org/name@main", "org/other@main", "org", "hf://org/name"):
        parse_hub_reference(text)
    assert hub.log == []


def test_importing_the_module_does_not_import_huggingface_hub() -> None:
    import subprocess

    code = "import sys, memopt.compressor.checkpoint.hub; print(sorted(m for m in sys.modules if 'hugging' in m))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
