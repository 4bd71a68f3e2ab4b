"""A rerun on a finished release: "complete already" only if source and release are what they were, byte for byte."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cli.invoke import invoke
from safetensors.torch import save_file
from tiny_checkpoints import make_checkpoint

import memopt
from faults.small_source import EXPERT, FLAGS, OPTIONS, compress, edit_tensor, file_of, make_small_source
from faults.trees import ledger_rows, stamps, tree
from memopt.compressor import release_file
from memopt.compressor.checkpoint.reader import SourceReader
from memopt.compressor.pipeline import run_plan
from memopt.compressor.progress import Progress
from memopt.compressor.quantize.backend import CpuBackend
from memopt.compressor.source_identity import SourceIdentity
from memopt.errors import (
    ContentError,
    InterruptedRunError,
    LayoutError,
    OutputError,
    SizeMismatchError,
    SourceChangedError,
)


@pytest.fixture(scope="session")
def finished(shared_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished release of the small source that no test may change."""
    out = tmp_path_factory.mktemp("finished") / "out"
    compress(shared_source, out)
    return out


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    """The same release, for a test to spoil."""
    return shutil.copytree(finished, tmp_path / "out")


@pytest.mark.parametrize("workers", [1, 4])
def test_it_is_read_whole_and_not_touched(workers: int, shared_source: Path, out: Path) -> None:
    before = stamps(out, set(tree(out)))
    seen: list[Progress] = []
    again = compress(shared_source, out, workers=workers, progress=seen.append)
    assert again.was_complete
    assert again.total_size_bytes == sum((out / name).stat().st_size for name in before)
    assert again.resumed_size_bytes == again.input_size_bytes
    assert stamps(out, set(tree(out))) == before
    assert {progress.stage for progress in seen} == {"check"}
    assert seen[-1].done_bytes == seen[-1].total_bytes == again.input_size_bytes + again.weights_size_bytes
    assert (seen[-1].num_done_units, seen[-1].num_resumed_units) == (again.num_units, 0)


def test_its_error_figures_are_those_of_the_first_run(shared_source: Path, out: Path, tmp_path: Path) -> None:
    first = compress(shared_source, tmp_path / "first")
    again = compress(shared_source, out)
    assert first.errors_by_role == again.errors_by_role
    assert 0 < again.errors_by_role["routed_expert"].relative_mse < 0.02


def test_another_checkpoint_with_the_same_headers_is_refused(tmp_path: Path) -> None:
    """The next version of a model: same names, shapes and configs, other weights."""
    options = memopt.PlanOptions(tensor_parallel=1)
    first, second = (make_checkpoint(tmp_path / f"v{seed}", "glm-5.2-fp8", seed=seed) for seed in (1, 2))
    out = tmp_path / "out"
    memopt.compress(first, out, options=options, device="cpu")
    before = tree(out)
    with pytest.raises(SourceChangedError, match="differs from what was read before") as caught:
        memopt.compress(second, out, options=options, device="cpu")
    assert caught.value.tensor is not None
    assert (second / str(caught.value.file)).exists()
    assert "another output folder" in caught.value.remedy
    assert tree(out) == before


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("position", [0, -1])
def test_one_other_bit_in_the_source_is_found(position: int, workers: int, source: Path, out: Path) -> None:
    path = edit_tensor(source, EXPERT, lambda raw: raw.__setitem__(position, raw[position] ^ 1))
    with pytest.raises(SourceChangedError) as caught:
        compress(source, out, workers=workers)
    assert (caught.value.tensor, caught.value.file) == (EXPERT, path.name)


def test_a_source_that_was_only_touched_is_the_same(source: Path, out: Path) -> None:
    for path in source.iterdir():
        os.utime(path, ns=(1, 1))
    assert compress(source, out).was_complete


def test_a_hub_source_is_settled_by_its_commit(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(memopt.plan(source, options=OPTIONS), identity=SourceIdentity("hub", "org/name", "c" * 40))
    out = tmp_path / "hub"
    run_plan(plan, out, backend=CpuBackend())

    def refuse(*_: object) -> None:
        raise AssertionError("a source file was opened")

    with monkeypatch.context() as patch:
        patch.setattr(SourceReader, "__init__", refuse)
        assert run_plan(plan, out, backend=CpuBackend()).was_complete
        _flip(next(out.glob("*.safetensors")), -1)
        with pytest.raises(ContentError, match="was changed after it was written"):
            run_plan(plan, out, backend=CpuBackend())
    other = replace(plan, identity=SourceIdentity("hub", "org/name", "d" * 40))
    with pytest.raises(OutputError, match="another source"):
        run_plan(other, out, backend=CpuBackend())


def _flip(path: Path, position: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("row", [0, 40, -1])
@pytest.mark.parametrize("output", [0, -1])
def test_a_changed_byte_of_any_tensor_is_named(row: int, output: int, shared_source: Path, out: Path) -> None:
    written = ledger_rows(out)[row]["outputs"][output]
    path, start, size = file_of(out, written["name"])
    _flip(path, start + size // 2)
    refused = invoke("compress", shared_source, out, *FLAGS, "--json")
    assert (refused.code, refused.verdict["code"]) == (4, "MEMOPT_CONTENT")
    assert (refused.verdict["file"], refused.verdict["tensor"]) == (path.name, written["name"])
    assert f"remove {out} and run the same command again" in refused.refusal


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "ledger.jsonl", "config.json", "model.safetensors.index.json"]
)
def test_a_changed_byte_of_a_small_file_is_named(name: str, shared_source: Path, out: Path) -> None:
    _flip(out / name, -3)
    with pytest.raises(ContentError, match="was changed after it was written") as caught:
        compress(shared_source, out)
    assert caught.value.file == name
    assert f"remove {out}" in caught.value.remedy


def test_a_changed_byte_of_a_header_is_named(shared_source: Path, out: Path) -> None:
    path = next(out.glob("*.safetensors"))
    path.write_bytes(path.read_bytes().replace(b'.weight"', b'.weighT"', 1))
    with pytest.raises(ContentError, match="its header is not the planned one") as caught:
        compress(shared_source, out)
    assert caught.value.file == path.name
    assert f"remove {out}" in caught.value.remedy


def _another_total(table: dict) -> None:
    table["totals"]["files"] += 1


def _another_figure(table: dict) -> None:
    table["totals"]["error"]["routed_expert"]["relative_mse"] = "x"


def _another_role(table: dict) -> None:
    table["totals"]["error"]["router"] = table["totals"]["error"].pop("routed_expert")


def _no_totals(table: dict) -> None:
    table["totals"] = []


@pytest.mark.parametrize("change", [_another_total, _another_figure, _another_role, _no_totals])
def test_a_changed_release_json_is_named(change: Callable[[dict], None], shared_source: Path, out: Path) -> None:
    path = out / "release.json"
    size = path.stat().st_size
    table = json.loads(path.read_bytes())
    change(table)
    raw = json.dumps(table, indent=2, ensure_ascii=False).encode()
    path.write_bytes(raw + b" " * (size - len(raw)))
    # A change that makes it longer is told by its size.
    with pytest.raises((ContentError, SizeMismatchError)) as caught:
        compress(shared_source, out)
    assert caught.value.file == "release.json"


@pytest.mark.parametrize("field", ["role", "fate", "offset", "outputs"])
def test_a_ledger_with_its_own_digest_still_has_to_be_the_plans(field: str, shared_source: Path, out: Path) -> None:
    """Who changes the ledger may change release.json too; the plan knows every line but for its digests."""
    ledger, release = out / "ledger.jsonl", out / "release.json"
    old = ledger.read_bytes()
    new = old.replace(f'"{field}"'.encode(), f'"{field.upper()}"'.encode(), 1)
    ledger.write_bytes(new)
    digests = [hashlib.sha256(raw).hexdigest() for raw in (old, new)]
    release.write_text(release.read_text().replace(*digests))
    with pytest.raises(ContentError, match="its line is not the planned one") as caught:
        compress(shared_source, out)
    assert caught.value.file == "ledger.jsonl"
    assert caught.value.tensor == json.loads(old.splitlines()[0])["tensor"]


@pytest.mark.parametrize("name", ["model-00002", "tokenizer_config.json", "ledger.jsonl", "config.json"])
def test_a_lost_or_resized_file_is_an_error(name: str, shared_source: Path, out: Path) -> None:
    path = next(out.glob(f"{name}*"))
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(SizeMismatchError, match=f"has {size + 1:,} bytes, the plan gave it {size:,}") as resized:
        compress(shared_source, out)
    path.unlink()
    with pytest.raises(OutputError, match="is missing from the finished release") as lost:
        compress(shared_source, out)
    assert resized.value.file == lost.value.file == path.name
    assert "run the same command again" in resized.value.remedy
    assert "run the same command again" in lost.value.remedy


def test_it_is_refused_to_another_recipe(shared_source: Path, out: Path) -> None:
    before = tree(out)
    with pytest.raises(OutputError, match="it holds a finished release of another source, recipe") as caught:
        compress(shared_source, out, recipe="dequantize")
    assert "name another output folder" in caught.value.remedy
    assert tree(out) == before


def test_it_is_refused_to_another_version_of_a_library(
    shared_source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a size mismatch: the release is good, and of another version."""
    monkeypatch.setattr(release_file.metadata, "version", lambda name: "99.1")
    with pytest.raises(OutputError, match="or version of memopt, numba or numpy"):
        compress(shared_source, out)


def test_it_is_refused_once_another_file_is_left_behind(source: Path, out: Path) -> None:
    (source / "notes.pt").write_bytes(b"x")
    with pytest.raises(OutputError, match="another source"):
        compress(source, out)


def test_ctrl_c_while_it_is_checked(shared_source: Path, out: Path) -> None:
    def stop(progress: Progress) -> None:
        raise KeyboardInterrupt

    before = stamps(out, set(tree(out)))
    for workers in (1, 2):
        with pytest.raises(InterruptedRunError, match="which is complete, was checked; nothing was changed"):
            compress(shared_source, out, workers=workers, progress=stop)
    assert stamps(out, set(tree(out))) == before


def test_a_dropped_tensor_has_its_line_too(tmp_path: Path) -> None:
    source, out = make_small_source(tmp_path / "source"), tmp_path / "out"
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file({name: torch.ones(8)}, source / "model-buffers.safetensors")
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"][name] = "model-buffers.safetensors"
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    compress(source, out)
    assert compress(source, out).was_complete
    ledger, release = out / "ledger.jsonl", out / "release.json"
    old = ledger.read_bytes()
    new = old.replace(b"every engine computes", b"every engine COMPUTES")
    assert new != old
    ledger.write_bytes(new)
    release.write_text(release.read_text().replace(*(hashlib.sha256(raw).hexdigest() for raw in (old, new))))
    with pytest.raises(ContentError, match="its line is not the planned one") as caught:
        compress(source, out)
    assert caught.value.tensor == name


def test_a_stray_file_in_a_finished_release_is_named(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "glm-5.2-fp8")
    options = memopt.PlanOptions(tensor_parallel=1)
    memopt.compress(source, tmp_path / "out", recipe="copy", options=options)
    (tmp_path / "out" / "extra.txt").write_text("x")
    with pytest.raises(LayoutError, match="nothing of memopt made it") as caught:
        memopt.compress(source, tmp_path / "out", recipe="copy", options=options)
    assert caught.value.file == "extra.txt"
