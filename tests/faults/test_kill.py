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
from faults.trees import finished_files, stamps, tree
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


def _kill_when(condition: Callable[[], bool], arguments: tuple[object, ...]) -> int:
    """Start the command, kill it once `condition` holds; its return code (it may have ended by itself)."""
    child = subprocess.Popen(command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while child.poll() is None and not condition():
            time.sleep(POLL_SECONDS)
    finally:
        child.kill()
    return child.wait(timeout=60)


def _kill_and_go_on(
    arguments: tuple[object, ...], out: Path, moments: Iterator[tuple[str, Callable[[], bool]]]
) -> list[tuple[str, int]]:
    """Kill the command at each moment, then let it end; a finished unit is never written again. The exit codes."""
    finished: dict[str, tuple[int, int]] = {}
    codes: list[tuple[str, int]] = []
    for moment, condition in moments:
        codes.append((moment, _kill_when(condition, arguments)))
        now = stamps(out, set(finished))
        assert now == finished, f"written again after {codes}"
        finished |= stamps(out, finished_files(out))
    # A kill among the units comes after one more of them; the later kills may find the job, and its records, gone.
    assert len(finished) >= sum(moment == "units" for moment, _ in codes), codes
    assert run_command(*arguments).code == 0
    assert stamps(out, set(finished)) == finished
    return codes


def _in_time(codes: list[tuple[str, int]]) -> list[int]:
    """The codes of all moments but the end: it takes milliseconds, so that its kills may come late."""
    return [code for moment, code in codes if moment not in {"ledger", "release", "state removed"}]


def test_twenty_kills_leave_the_same_tree_and_no_unit_is_redone(tmp_path: Path) -> None:
    expected, out = tmp_path / "expected", tmp_path / "out"
    assert run_command("compress", TINY_GLM5, expected, *ARGUMENTS).code == 0
    codes = _kill_and_go_on(("compress", TINY_GLM5, out, *ARGUMENTS), out, _moments(out, random.Random(SEED)))
    assert len(codes) == NUM_KILLS
    assert _in_time(codes) == [-9] * 17, codes
    assert tree(out) == tree(expected)


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a release of many units, `both` with files for two ranks, and `hub` without."""
    folder = tmp_path_factory.mktemp("releases")
    assert run_command("compress", TINY_GLM5, folder / "both", *ARGUMENTS, "--tp", "2").code == 0
    assert run_command("compress", TINY_GLM5, folder / "hub", *ARGUMENTS).code == 0
    return folder


@pytest.mark.parametrize(("job", "source", "made"), [("shard", "hub", "both"), ("merge", "both", "hub")])
def test_kills_of_shard_and_merge_leave_the_same_tree(
    job: str, source: str, made: str, releases: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    degree = ("--tp", "2") if job == "shard" else ()
    arguments = (job, releases / source, out, *degree, "--workers", "1")
    chosen = random.Random(SEED)
    # Every second one: twenty would take half a minute more, and the code is the same.
    moments = (moment for number, moment in enumerate(_moments(out, chosen)) if number % 2)
    codes = _kill_and_go_on(arguments, out, moments)
    assert len(codes) == NUM_KILLS // 2
    assert _in_time(codes).count(-9) >= 7, codes
    assert tree(out) == tree(releases / made)


def _crash(source: Path, work: Path, mode: str, job: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, crash_points.__file__, str(source), str(work), mode, job],
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


@pytest.mark.parametrize(
    ("mode", "job"),
    [("once", "hub"), ("twice", "hub"), ("twice", "ranks"), ("twice", "shard"), ("twice", "merge")],
)
def test_a_power_cut_at_every_step_can_be_resumed(mode: str, job: str, shared_source: Path, work: Path) -> None:
    result = _crash(shared_source, work, mode, job)
    assert result["problems"] == []
    # Ten units and four small files, each created, flushed, renamed and recorded.
    assert isinstance(result["points"], int)
    assert result["points"] > 100


def test_kill_is_what_the_test_says(tmp_path: Path) -> None:
    assert _kill_when(lambda: True, ("compress", TINY_GLM5, tmp_path / "out", *ARGUMENTS)) == -signal.SIGKILL
