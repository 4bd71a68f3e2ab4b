"""Kill -9 at any moment: a rerun goes on where it stopped and ends with the same bytes."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli.invoke import command, run_command
from tiny_checkpoints import TINY_GLM5

from faults import crash_points
from faults.trees import finished_units, stamps, tree
from memopt.compressor.workspace import STATE_FOLDER

TESTS = Path(__file__).parents[1]
SEED = 20260101
NUM_KILLS = 20
# 53 files or so: eleven kills, each at most a few files later, do not reach the end.
ARGUMENTS = ("--max-file-size", "250KB", "--workers", "2")
POLL_SECONDS = 0.0005
START_UP_SECONDS = 0.4


def _count_records(out: Path) -> int:
    try:
        return sum(name.endswith(".json") for name in os.listdir(out / STATE_FOLDER / "units"))
    except FileNotFoundError:
        return 0


def _moments(out: Path, chosen: random.Random) -> Iterator[tuple[str, Callable[[], bool]]]:
    """When to kill: twenty conditions over start-up, small files, units and the end, each a little later."""
    for _ in range(3):
        end = time.monotonic() + chosen.uniform(0, START_UP_SECONDS)
        yield "start-up", lambda end=end: time.monotonic() > end
    yield "state folder", (out / STATE_FOLDER).exists
    yield "plan", (out / STATE_FOLDER / "plan.json").exists
    yield "small files", (out / "config.json").exists
    for _ in range(11):
        wanted = _count_records(out) + chosen.randint(1, 2)
        yield "units", lambda wanted=wanted: _count_records(out) >= wanted
    yield "ledger", (out / "ledger.jsonl").exists
    yield "release", (out / "release.json").exists
    yield "state removed", lambda: (out / "release.json").exists() and not (out / STATE_FOLDER / "lock").exists()


def _kill_when(condition: Callable[[], bool], out: Path) -> int:
    """Start the command, kill it once `condition` holds; its return code (it may have ended by itself)."""
    child = subprocess.Popen(
        command("compress", TINY_GLM5, out, *ARGUMENTS), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while child.poll() is None and not condition():
            time.sleep(POLL_SECONDS)
    finally:
        child.kill()
    return child.wait(timeout=60)


def test_twenty_kills_leave_the_same_tree_and_no_unit_is_redone(tmp_path: Path) -> None:
    expected = tmp_path / "expected"
    assert run_command("compress", TINY_GLM5, expected, *ARGUMENTS).code == 0
    out = tmp_path / "out"
    finished: dict[str, tuple[int, int]] = {}
    codes: list[tuple[str, int]] = []
    for moment, condition in _moments(out, random.Random(SEED)):
        codes.append((moment, _kill_when(condition, out)))
        now = stamps(out, set(finished))
        assert now == finished, f"written again after {codes}"
        finished |= stamps(out, finished_units(out))
    assert len(codes) == NUM_KILLS
    # The end takes milliseconds: its kills may come late, the others may not.
    assert [code for moment, code in codes if moment not in {"ledger", "release", "state removed"}] == [-9] * 17, codes
    assert len(finished) >= 11
    assert run_command("compress", TINY_GLM5, out, *ARGUMENTS).code == 0
    assert stamps(out, set(finished)) == finished
    assert tree(out) == tree(expected)


def _crash(source: Path, work: Path, mode: str, layout: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, crash_points.__file__, str(source), str(work), mode, layout],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout)
    return result


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: thousands of flushes to a disk take long."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    folder = memory / f"memopt-crash-points-{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize(("mode", "layout"), [("once", "hub"), ("twice", "hub"), ("twice", "ranks")])
def test_a_power_cut_at_every_step_can_be_resumed(mode: str, layout: str, shared_source: Path, work: Path) -> None:
    result = _crash(shared_source, work, mode, layout)
    assert result["problems"] == []
    # Ten units and four small files, each created, flushed, renamed and recorded.
    assert isinstance(result["points"], int)
    assert result["points"] > 100


def test_kill_is_what_the_test_says(tmp_path: Path) -> None:
    assert _kill_when(lambda: True, tmp_path / "out") == -signal.SIGKILL
