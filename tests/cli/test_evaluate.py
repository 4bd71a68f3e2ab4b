"""`memopt evaluate`: wrong calls are told before any work, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_checkpoints import TINY_GLM5

from cli.invoke import invoke


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--base-results", "r.json"), "results of one model alone"),
        (("--task", "gsm8k", "--base-url", "http://h/v1/completions"), "--task without two servers"),
        (("--base-url", "http://h/v1/completions"), "servers, or a limit, and no task to run"),
        (("--task-limit", "5"), "servers, or a limit, and no task to run"),
        (("--task", "a", "--base-url", "h:1", "--release-url", "http://h"), "'h:1' is no address"),
        (("--scratch", "/nowhere"), "has no release.json and ledger.jsonl"),
        (("--window", "1"), "1 is not in the range x>=2"),
        (("--kv-cache", "int3"), "'int3' is not one of"),
        (("--no-write",), "has no release.json and ledger.jsonl"),
    ],
)
def test_wrong_calls(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    data = tmp_path / "text.jsonl"
    data.write_text('{"text": "a sentence"}\n')
    refused = invoke("evaluate", TINY_GLM5, TINY_GLM5, "--data", data, *arguments)
    assert refused.code == 2
    assert words in refused.refusal


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    refused = invoke("evaluate", TINY_GLM5, tmp_path / "none", "--data", tmp_path / "text.jsonl")
    assert (refused.code, "none has no release.json" in refused.refusal) == (2, True)


@pytest.mark.parametrize(
    ("base", "release", "words"),
    [
        ("", "r", "BASE has no name"),
        (".", "", "RELEASE has no name"),
        ("hf://zai-org/GLM-5.2-FP8", "r", "BASE hf://zai-org/GLM-5.2-FP8 is on the Hub"),
        ("zai-org/GLM-5.2-FP8@main", "r", "fetch it, and name its folder"),
        (".", "zai-org/GLM-5.2-FP8@main", "RELEASE zai-org/GLM-5.2-FP8@main is on the Hub"),
    ],
)
def test_models_are_folders(base: str, release: str, words: str) -> None:
    refused = invoke("evaluate", base, release, "--data", "text.jsonl")
    assert (refused.code, words in refused.refusal) == (2, True), refused.refusal


def test_data_is_asked_for() -> None:
    refused = invoke("evaluate", TINY_GLM5, TINY_GLM5)
    assert (refused.code, "Missing option '--data'" in refused.refusal) == (2, True)
