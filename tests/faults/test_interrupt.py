"""Ctrl-C and SIGTERM: the exit code says so, the message how to go on, and a rerun ends with the same bytes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from cli.invoke import command, invoke, run_command
from tiny_checkpoints import TINY_GLM5

from faults.small_source import FLAGS, compress
from faults.trees import finished_units, stamps, tree
from memopt.compressor import pipeline
from memopt.compressor.workspace import STATE_FOLDER
from memopt.errors import InterruptedRunError

ARGUMENTS = ("--max-file-size", "500KB", "--workers", "2")
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


def _interrupt(out: Path, number: signal.Signals, *flags: str) -> subprocess.CompletedProcess[str]:
    """Start the command in a process group of its own and signal the group once two units are finished."""
    child = subprocess.Popen(
        command("compress", TINY_GLM5, out, *ARGUMENTS, *flags),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    end = time.monotonic() + 60
    while child.poll() is None and time.monotonic() < end:
        units = out / STATE_FOLDER / "units"
        if units.is_dir() and len(os.listdir(units)) >= 2:
            break
        time.sleep(0.001)
    os.killpg(child.pid, number)
    stdout, stderr = child.communicate(timeout=60)
    return subprocess.CompletedProcess([], child.returncode, stdout, stderr)


def _handles(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught & 1 << (number - 1))


@pytest.mark.parametrize("number", list(CODES))
def test_a_signal_leaves_a_state_to_go_on_from(number: signal.Signals, tmp_path: Path) -> None:
    out = tmp_path / "out"
    stopped = _interrupt(out, number, "--json")
    assert stopped.returncode == CODES[number], stopped.stderr
    assert "Traceback" not in stopped.stderr
    last = stopped.stderr.splitlines()[-1]
    assert last.startswith("memopt compress: MEMOPT_INTERRUPTED: ")
    assert f"{out} keeps every finished unit (run the same command again to go on)" in last
    verdict = json.loads(stopped.stdout)
    assert (verdict["status"], verdict["code"], verdict["exit_code"]) == (
        "refused", "MEMOPT_INTERRUPTED", CODES[number],
    )  # fmt: skip
    finished = finished_units(out)
    before = stamps(out, finished)
    assert len(finished) >= 2
    again = run_command("compress", TINY_GLM5, out, *ARGUMENTS)
    assert again.code == 0
    assert f"{len(finished)} of them from an interrupted run" in again.stdout
    assert stamps(out, finished) == before


@pytest.mark.parametrize("place", ["_write_small_files", "_check_space", "take_over", "balance"])
def test_ctrl_c_outside_the_units_says_the_same(
    place: str, source: Path, reference: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, place, stop)
        with pytest.raises(InterruptedRunError, match="keeps every finished unit"):
            compress(source, out)
        refused = invoke("compress", source, out, *FLAGS)
    assert (refused.code, "keeps every finished unit" in refused.refusal) == (130, True)
    compress(source, out)
    assert tree(out) == reference


def test_ctrl_c_while_threads_are_started_leaves_none_at_work(
    source: Path, reference: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that nobody has noted must not write, or report progress, after the refusal."""
    out = tmp_path / "out"
    start = threading.Thread.start
    unnoted: list[threading.Thread] = []
    reports: list[object] = []

    def interrupted_start(thread: threading.Thread) -> None:
        start(thread)
        if thread.name.startswith("memopt-unit"):
            unnoted.append(thread)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted_start)
        with pytest.raises(InterruptedRunError, match="keeps every finished unit"):
            compress(source, out, progress=reports.append)
    unnoted[0].join(5)
    assert (len(unnoted), unnoted[0].is_alive(), reports, finished_units(out)) == (1, False, [], set())
    compress(source, out)
    assert tree(out) == reference


def test_a_signal_at_any_moment_is_one_line(source: Path, reference: dict[str, str], tmp_path: Path) -> None:
    """Random moments, most imports included; whatever was said, the rerun ends well."""
    chosen = random.Random(20260102)
    out = tmp_path / "out"
    for _ in range(5):
        child = subprocess.Popen(
            command("compress", source, out, *FLAGS), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        # Before its handlers are there, a process is Python's own to end.
        while child.poll() is None and not _handles(child.pid, signal.SIGTERM):
            time.sleep(0.001)
        time.sleep(chosen.uniform(0, 0.6))
        child.send_signal(signal.SIGINT)
        _, stderr = child.communicate(timeout=60)
        assert child.returncode in {0, 130}, stderr
        assert "Traceback" not in stderr
        if child.returncode == 130:
            assert stderr.splitlines()[-1].startswith("memopt"), stderr
            assert "MEMOPT_INTERRUPTED" in stderr.splitlines()[-1]
    compress(source, out)
    assert tree(out) == reference
