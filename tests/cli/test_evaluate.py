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


def test_data_is_asked_for() -> None:
    refused = invoke("evaluate", TINY_GLM5, TINY_GLM5)
    assert (refused.code, "Missing option '--data'" in refused.refusal) == (2, True)
