"""`memopt compress`: what it says while it runs and at the end, on a terminal, in a log and to a machine."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from pathlib import Path

import pytest
from faults.small_source import FLAGS, make_small_source
from faults.trees import tree
from tiny_checkpoints import TINY_GLM5

import memopt
from cli.invoke import command, invoke, run_command


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_source(tmp_path_factory.mktemp("compress") / "source")


def test_the_end_says_what_where_how_big_and_what_next(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = invoke("compress", source, out, *FLAGS, "--workers", "2")
    assert made.code == 0
    lines = made.stdout.splitlines()
    assert lines[0] == f"made        {out}: 10 weight files"
    assert re.fullmatch(r"size        [\d.,]+ MiB \([\d.,]+ MB\) -> .* of weights", lines[1])
    assert re.fullmatch(r"time        .*, [\d.]+ GB/s of source", lines[2])
    assert re.fullmatch(r"rounding    routed_expert: relative MSE 0\.\d+, largest .*, clipped .*%", lines[3])
    assert lines[4] == f"next        memopt sign {out} --key release.pem"
    assert len(lines) == 5
    again = invoke("compress", source, out, *FLAGS)
    assert again.code == 0
    assert all(line.startswith("check ") for line in again.stderr.splitlines())
    assert again.stdout.splitlines()[0].startswith(f"{out} is complete already: ")


def test_one_verdict_for_machines(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    verdict = invoke("compress", source, out, *FLAGS, "--json").verdict
    assert (verdict["schema"], verdict["command"], verdict["status"], verdict["exit_code"]) == (
        "memopt.verdict/1", "compress", "ok", 0,
    )  # fmt: skip
    assert (verdict["out"], verdict["num_units"], verdict["was_complete"]) == (str(out), 10, False)
    assert verdict["total_size_bytes"] == sum(path.stat().st_size for path in out.iterdir())
    assert set(verdict["errors_by_role"]["routed_expert"]) == {"relative_mse", "max_error", "clipped_share"}
    assert (verdict["resumed_size_bytes"], verdict["num_resumed_units"]) == (0, 0)
    again = invoke("compress", source, out, *FLAGS, "--json").verdict
    assert (again["was_complete"], again["errors_by_role"]) == (True, verdict["errors_by_role"])


def test_a_log_gets_plain_lines(source: Path, tmp_path: Path) -> None:
    made = run_command("compress", source, tmp_path / "out", *FLAGS)
    assert made.code == 0
    lines = made.stderr.splitlines()
    assert lines
    for line in lines:
        assert re.fullmatch(
            r".+ of .+ \(.+\), [\d.]+ GB/s(, .+ left)?, file \d+ of 10 done: model-000\d\d-of-00010\.safetensors", line
        ), line
    assert "file 10 of 10 done" in lines[-1]
    assert "\x1b" not in made.stdout + made.stderr


def _read_all(descriptor: int) -> str:
    parts: list[bytes] = []
    while True:
        try:
            part = os.read(descriptor, 65536)
        except OSError:
            # Linux ends a terminal's output with EIO.
            break
        if not part:
            break
        parts.append(part)
    return b"".join(parts).decode()


def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        command("compress", TINY_GLM5, tmp_path / "out", "--max-file-size", "500KB"),
        stdout=subprocess.PIPE, stderr=theirs, env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "140"},
    )  # fmt: skip
    os.close(theirs)
    shown = _read_all(ours)
    stdout, _ = child.communicate(timeout=60)
    os.close(ours)
    assert child.returncode == 0
    assert "\x1b[" in shown
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "27/27 model-000" in plain
    assert re.search(r"\d+(\.\d+)?/\d+(\.\d+)? MB", plain), plain[-500:]
    assert re.search(r"[kMG]B/s", plain)
    assert re.search(r"[\d.]+ s left", plain)
    assert b"\x1b" not in stdout


def test_recipe_and_name_reach_the_release(source: Path, tmp_path: Path) -> None:
    made = invoke(
        "compress", source, tmp_path / "out", *FLAGS, "--recipe", "glm-5.1-int4", "--name", "nightly", "--device", "cpu"
    )
    assert made.code == 0
    assert '"name": "nightly"' in (tmp_path / "out" / "release.json").read_text()


def test_python_and_the_command_make_the_same(source: Path, tmp_path: Path) -> None:
    invoke("compress", source, tmp_path / "command", "--tp", "1", "--allow-code")
    memopt.compress(source, tmp_path / "python", options=memopt.PlanOptions(tensor_parallel=1, allow_code=True))
    assert tree(tmp_path / "command") == tree(tmp_path / "python")
    assert "modeling_custom.py" in tree(tmp_path / "command")


def test_a_log_whose_reader_leaves_does_not_stop_the_work(source: Path, tmp_path: Path) -> None:
    """`memopt compress … 2>&1 | true`."""
    reader, writer = os.pipe()
    os.close(reader)
    child = subprocess.Popen(command("compress", source, tmp_path / "out", *FLAGS), stdout=writer, stderr=writer)
    os.close(writer)
    assert child.wait(timeout=60) == 0
    assert invoke("compress", source, tmp_path / "out", *FLAGS, "--json").verdict["was_complete"] is True
