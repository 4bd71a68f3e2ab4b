"""Every interpreted/interpreted_*.py passes in a process of its own with TRITON_INTERPRET=1.

Of its own, because Triton reads the variable when it decorates a kernel, and because an out-of-range pointer in the
interpreter is a segmentation fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from child_process import ROOT, ChildResult, run_child, started

FOLDER = Path(__file__).parent / "interpreted"
FILES = sorted(path.name for path in FOLDER.glob("interpreted_*.py"))
INTERPRETER = {"TRITON_INTERPRET": "1"}
TIMEOUT_SECONDS = 240.0

Children = dict[str, Future[ChildResult]]


def _arguments(path: Path) -> list[str]:
    # An empty -m runs the tests that the project's own default leaves out as well.
    return ["-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-m", "", "--durations=3", str(path)]


@pytest.fixture(scope="module")
def children(request: pytest.FixtureRequest) -> Iterator[Children]:
    """The children of the files that this run selected."""
    selected = {getattr(item, "callspec", None) and item.callspec.params.get("file") for item in request.session.items}
    commands = {name: _arguments(FOLDER / name) for name in FILES if name in selected}
    with started(commands, INTERPRETER, TIMEOUT_SECONDS) as running:
        yield running


@pytest.mark.parametrize("file", FILES)
def test_the_file_passes(file: str, children: Children) -> None:
    result = children[file].result()
    assert result.is_success, f"{file}: {result.ended}\n{result.output}"
    passed = re.search(r"(\d+) passed", result.output)
    assert passed is not None, f"{file}: no test passed\n{result.output}"
    assert "skipped" not in result.output, f"{file}: a skipped test proves nothing\n{result.output}"


def test_a_crash_is_named_by_its_signal(tmp_path: Path) -> None:
    (tmp_path / "test_crash.py").write_text("import ctypes\ndef test_crash():\n    ctypes.string_at(8)\n")
    result = run_child(_arguments(tmp_path / "test_crash.py"), {}, 60.0)
    assert result.ended == "killed by SIGSEGV"
    assert "test_crash.py" in result.output


def test_a_file_without_tests_fails(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text("def helper():\n    pass\n")
    assert run_child(_arguments(tmp_path / "test_nothing.py"), {}, 60.0).ended == "exit code 5"


def test_a_hanging_child_is_ended() -> None:
    result = run_child(["-c", "import time; print('alive', flush=True); time.sleep(60)"], {}, 0.5)
    assert not result.is_success
    assert result.ended == "still running after 0.5 s"
    assert "alive" in result.output


def test_the_children_are_found() -> None:
    assert FILES
    assert (ROOT / "pyproject.toml").is_file()
