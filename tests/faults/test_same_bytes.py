"""The same bytes whatever the workers, the backend, the place and the memory."""

from __future__ import annotations

import os
import re
import resource
import shutil
from pathlib import Path

import pytest
from cli.invoke import run_command

import memopt
from faults.small_source import FLAGS, OPTIONS, compress
from faults.trees import tree
from memopt.compressor.pipeline import run_plan
from memopt.compressor.quantize.backend import CpuBackend, TorchBackend


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_do_not_change_bytes(
    workers: int, shared_source: Path, reference: dict[str, str], tmp_path: Path
) -> None:
    result = compress(shared_source, tmp_path / "out", workers=workers)
    assert result.num_units >= 8
    assert tree(tmp_path / "out") == reference


def test_backend_does_not_change_bytes(shared_source: Path, reference: dict[str, str], tmp_path: Path) -> None:
    plan = memopt.plan(shared_source, options=OPTIONS)
    run_plan(plan, tmp_path / "cpu", backend=CpuBackend())
    run_plan(plan, tmp_path / "torch", backend=TorchBackend("cpu"))
    assert tree(tmp_path / "cpu") == tree(tmp_path / "torch") == reference


@pytest.mark.parametrize("chunk_bytes", [128, 1000, 5 * 2**12])
def test_chunk_size_does_not_change_bytes(
    chunk_bytes: int, shared_source: Path, reference: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuBackend, "chunk_bytes", chunk_bytes)
    monkeypatch.setattr(TorchBackend, "chunk_bytes", chunk_bytes)
    plan = memopt.plan(shared_source, options=OPTIONS)
    for number, backend in enumerate((CpuBackend(), TorchBackend("cpu"))):
        run_plan(plan, tmp_path / str(number), backend=backend)
        assert tree(tmp_path / str(number)) == reference


def test_hash_seed_place_and_memory_limit_do_not_change_bytes(
    shared_source: Path, reference: dict[str, str], tmp_path: Path
) -> None:
    elsewhere = tmp_path / "another place"
    elsewhere.mkdir()
    copy = shutil.copytree(shared_source, elsewhere / "a copy é")
    done = run_command(
        "compress", copy.name, "deep/er/out", *FLAGS, "--workers", "3",
        cwd=elsewhere,
        env=os.environ | {"PYTHONHASHSEED": "12345", "HOME": str(tmp_path)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30)),
    )  # fmt: skip
    assert (done.code, done.stderr.count("Traceback")) == (0, 0)
    assert tree(elsewhere / "deep/er/out") == reference


def test_no_path_of_the_machine_is_in_the_release(shared_source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    compress(shared_source, out)
    paths = [str(tmp_path).encode(), str(shared_source).encode(), os.getcwd().encode()]
    for path in out.iterdir():
        raw = path.read_bytes()
        assert not [secret for secret in paths if secret in raw], path.name
    for name in ("release.json", "ledger.jsonl", "config.json"):
        text = (out / name).read_text()
        assert os.uname().nodename not in re.findall(r"[\w.-]+", text)
        assert not re.search(r"\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d", text), "a date or a time"
