"""No space: told before anything is written, or in the middle; nothing is lost and a rerun ends with the same bytes."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from cli.invoke import run_command

from faults.small_source import FLAGS, compress
from faults.trees import finished_units, stamps, tree
from memopt.compressor.workspace import STATE_FOLDER
from memopt.errors import DiskFullError

# Enough for the small files and some of the units, not for all (about 1.4 MB).
LIMIT_BYTES = 640 * 1024
ENOUGH_BYTES = 16 * 2**20


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_missing_space_is_told_before_anything_is_written(
    source: Path, reference: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: Usage(10**6, 10**6 - 1000, 1000))
        with pytest.raises(DiskFullError, match=r"[\d,]+ bytes are still to be written, 1,000 are free") as caught:
            compress(source, out)
    assert (caught.value.code, int(caught.value.exit_code)) == ("MEMOPT_DISK_FULL", 7)
    assert {path.name for path in out.iterdir()} == {STATE_FOLDER}
    compress(source, out)
    assert tree(out) == reference


def test_finished_units_do_not_count_as_space_to_come(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = compress(source, tmp_path / "whole").total_size_bytes
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(whole, 0, whole))
    compress(source, tmp_path / "fits")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(whole, 1, whole - 1))
    with pytest.raises(DiskFullError, match=f"{whole:,} bytes are still to be written, {whole - 1:,} are free"):
        compress(source, tmp_path / "does not fit")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of LIMIT_BYTES; skipped where it cannot be mounted (the next test needs no rights)."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={LIMIT_BYTES}", "memopt-test", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_fills_up_loses_nothing(
    small_disk: Path, source: Path, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = small_disk / "out"
    # Somebody else takes the space after the check.
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 0, 10**12))
        with pytest.raises(DiskFullError, match="No space left on device") as caught:
            compress(source, out, workers=2)
    assert "finished units are kept" in caught.value.remedy
    finished = finished_units(out)
    before = stamps(out, finished)
    assert finished
    refused = run_command("compress", source, out, *FLAGS)
    assert (refused.code, "MEMOPT_DISK_FULL" in refused.refusal) == (7, True)
    assert stamps(out, finished) == before
    subprocess.run(["mount", "-o", f"remount,size={ENOUGH_BYTES}", str(small_disk)], check=True)
    assert compress(source, out).num_resumed_units == len(finished)
    assert stamps(out, finished) == before
    assert tree(out) == reference


def test_a_file_size_limit_is_a_full_disk(source: Path, reference: dict[str, str], tmp_path: Path) -> None:
    """RLIMIT_FSIZE gives EFBIG in the middle of a write, without any rights."""
    out = tmp_path / "out"
    limit = 150 * 1024

    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    failed = run_command("compress", source, out, *FLAGS, "--json", preexec_fn=limit_files)
    assert failed.code == 7
    assert (failed.verdict["code"], failed.verdict["exit_code"]) == ("MEMOPT_DISK_FULL", 7)
    assert str(out) in failed.verdict["file"]
    assert all(path.stat().st_size <= limit for path in out.glob("*.safetensors"))
    finished = finished_units(out)
    assert compress(source, out).num_resumed_units == len(finished)
    assert tree(out) == reference


@pytest.mark.parametrize("name", ["plan.json", "config.json", "00002.json", "ledger.jsonl", "release.json"])
def test_no_space_for_a_small_file(
    name: str, source: Path, reference: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    fsync = os.fsync

    def full(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(f"/{name}"):
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DiskFullError, match="No space left on device") as caught:
            compress(source, out)
    assert caught.value.file is not None
    assert caught.value.file.endswith(name)
    assert not (out / "release.json").exists()
    finished = finished_units(out)
    before = stamps(out, finished)
    assert compress(source, out).num_resumed_units == len(finished)
    assert stamps(out, finished) == before
    assert tree(out) == reference
