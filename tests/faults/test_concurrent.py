"""Two runs on one output: the second is refused, the first is unharmed."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
from cli.invoke import command, invoke

from faults.small_source import FLAGS, compress
from faults.trees import tree
from memopt.compressor.progress import Progress
from memopt.errors import MemoptError, OutputError


def test_the_second_run_is_refused_and_the_first_goes_on(
    source: Path, reference: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    refusals: list[MemoptError] = []

    def start_another(progress: Progress) -> None:
        with pytest.raises(OutputError) as caught:
            compress(source, out)
        refusals.append(caught.value)

    compress(source, out, progress=start_another)
    assert len(refusals) >= 2
    assert {(error.code, error.message) for error in refusals} == {
        ("MEMOPT_OUTPUT", f"another run is writing to {out}")
    }
    assert tree(out) == reference


def test_another_plan_is_refused_while_a_run_is_on(source: Path, reference: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    codes: list[tuple[int, bool]] = []

    def start_one(progress: Progress) -> None:
        if not codes:
            refused = subprocess.run(
                command("dequantize", source, out), capture_output=True, text=True, check=False, timeout=60
            )
            codes.append((refused.returncode, "MEMOPT_OUTPUT" in refused.stderr))

    compress(source, out, progress=start_one)
    assert codes == [(2, True)]
    assert tree(out) == reference


def test_of_two_that_start_together_one_wins(source: Path, reference: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    children = [
        subprocess.Popen(command("compress", source, out, *FLAGS), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    codes = sorted(child.wait(timeout=60) for child in children)
    for child in children:
        child.communicate()
    # One that comes late finds a complete release: 0 too.
    assert codes[0] == 0
    assert set(codes) <= {0, 2}
    assert tree(out) == reference


def test_the_lock_ends_with_its_process(source: Path, reference: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    child = subprocess.Popen(
        command("compress", source, out, *FLAGS), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while child.poll() is None and not (out / ".memopt" / "lock").exists():
        time.sleep(0.001)
    child.kill()
    child.wait(timeout=60)
    assert invoke("compress", source, out, *FLAGS).code == 0
    assert tree(out) == reference
