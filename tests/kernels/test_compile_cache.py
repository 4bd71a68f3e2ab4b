"""Where compiled kernels are kept, and that a run needs no such place."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from memopt.kernels import compile_cache, cpu_entry
from memopt.kernels.compile_cache import is_private

ROOT = Path(__file__).parents[2]
EXPAND = """
import sys, numpy as np
from memopt.kernels import cpu, cpu_entry
assert cpu_entry.__file__.startswith(sys.argv[1]), cpu_entry.__file__
print(cpu.dequantize_float8_bf16(np.full((1, 8), 0x38, np.uint8), np.ones((1, 1), np.float32), (128, 128))[0, 0])
print(cpu_entry.expand_fp8_entry().dispatcher.stats.cache_path)
"""


def _scaled_bits() -> Any:
    """A new `scaled_bits` entry, called once."""
    entry: Any = cpu_entry.scaled_bits_entry.__wrapped__()
    assert entry(np.full(2, 0x38, np.uint8), np.ones(2, np.float32)).tolist() == [0x3F800000, 0x3F800000]
    return entry


def _kept(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.fixture
def numba_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "numba"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(folder))
    return folder


def test_nothing_can_be_written(tmp_path: Path) -> None:
    # A plain file where the cache folder would be stops root too, whom a read-only mode does not.
    for name in ("memopt", "kernels"):
        target = tmp_path / "memopt" / ("" if name == "memopt" else name)
        shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    (tmp_path / "memopt" / "kernels" / "__pycache__").write_text("")
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(tmp_path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": "/dev/null",
    }
    command = [sys.executable, "-c", EXPAND, str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(0x3F80), "None"]


def test_a_private_folder_is_used(numba_folder: Path) -> None:
    _scaled_bits()
    assert any(path.suffix == ".nbc" for path in _kept(numba_folder))


@pytest.mark.parametrize("above", [False, True])
def test_code_from_a_folder_that_others_write_is_not_run(numba_folder: Path, above: bool) -> None:
    _scaled_bits()
    (index,) = (path for path in _kept(numba_folder) if path.suffix == ".nbi")
    index.write_bytes(b"planted")  # read, it would fail
    (numba_folder if above else index.parent).chmod(0o777)
    assert _scaled_bits().dispatcher.stats.cache_path is None


def test_a_torn_cache_does_not_stop_the_work(numba_folder: Path) -> None:
    _scaled_bits()
    for path in _kept(numba_folder):
        path.write_bytes(path.read_bytes()[:20])
    assert _scaled_bits().dispatcher.stats.cache_path is None


def test_a_cache_that_cannot_be_written_any_more(numba_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry: Any = cpu_entry.scaled_bits_entry.__wrapped__()
    folder = Path(entry.dispatcher.stats.cache_path)
    folder.rmdir()
    folder.write_text("")
    assert entry(np.zeros(2, np.uint8), np.ones(2, np.float32)).tolist() == [0, 0]


def test_an_error_of_the_kernel_stays_one(numba_folder: Path) -> None:
    entry: Any = cpu_entry.scaled_bits_entry.__wrapped__()
    with pytest.raises(numba.TypingError):
        entry("not an array", None)


def test_private_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "above" / "cache"
    folder.mkdir(parents=True)
    assert is_private(folder)
    for place, mode in ((folder, 0o777), (folder, 0o1777), (folder.parent, 0o777)):
        place.chmod(mode)
        assert not is_private(folder)
        place.chmod(0o755)
    folder.parent.chmod(0o1777)
    assert is_private(folder)
    assert not is_private(folder / "missing")
    # A link is no way around the folder that it leads to, nor around the one that it lies in.
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "open" / "cache").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "open" / "cache")
    (tmp_path / "open" / "link").symlink_to(folder)
    assert not is_private(tmp_path / "link")
    assert not is_private(tmp_path / "open" / "link")


def test_a_folder_of_another_user_is_not_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(compile_cache, "ROOT_USER", owner + 1)
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert not is_private(tmp_path)


def test_a_folder_of_another_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o770)
    assert is_private(tmp_path)
    monkeypatch.setattr(os, "getegid", lambda: tmp_path.stat().st_gid + 1)
    assert not is_private(tmp_path)
