"""A finished release balances: every source tensor once, every digest true, every small file as it came."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.trees import ledger_rows
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_checkpoints import (
    NAMES,
    make_checkpoint,
    make_tensors,
    tiny_config,
    write_checkpoint,
)

import memopt
from memopt.compressor.checkpoint.checkpoint import open_checkpoint
from memopt.compressor.checkpoint.model_config import parse_config
from memopt.compressor.checkpoint.skeleton import skeleton_checkpoint
from memopt.compressor.ledger import LARGEST_FIGURE
from memopt.compressor.pipeline import run_plan
from memopt.compressor.progress import Progress
from memopt.compressor.quantize.backend import CpuBackend
from memopt.errors import SizeMismatchError, UsageError
from memopt.manifests.safetensors_header import read_header

COPIED = ("generation_config.json", "tokenizer_config.json", "chat_template.jinja")
PICKLES = ("pytorch_model.bin", "model.pt", "weights.pkl", "optimizer.pth", "training_args.bin")
SMALL = memopt.PlanOptions(max_file_bytes=2_000_000, tensor_parallel=1)


def compress(source: Path, out: Path, **options: Any) -> memopt.RunResult:
    return memopt.compress(source, out, **({"options": SMALL, "workers": 2, "device": "cpu"} | options))


def _bytes_of(folder: Path, file: str, start: int, size: int) -> bytes:
    with open(folder / file, "rb") as stream:
        stream.seek(start)
        return stream.read(size)


def _check_balance(source: Path, out: Path) -> None:
    checkpoint, release = open_checkpoint(source), open_checkpoint(out)
    rows = ledger_rows(out)
    read = Counter(part["name"] for row in rows for part in row["sources"])
    assert read == Counter(checkpoint.tensors.keys())
    written = Counter(output["name"] for row in rows for output in row["outputs"])
    assert written == Counter(release.tensors.keys())
    for row in rows:
        assert (row["fate"] == "dropped") == (not row["outputs"]) == ("reason" in row)
        assert ("error" in row) == (row["fate"] == "quantized")
        for part in row["sources"]:
            raw = _bytes_of(source, part["file"], part["offset"], part["size_bytes"])
            if row["outputs"]:
                assert hashlib.sha256(raw).hexdigest() == part["sha256"], part["name"]
        for output in row["outputs"]:
            stored = release.tensors[output["name"]]
            assert (stored.file, stored.dtype, list(stored.shape)) == (output["file"], output["dtype"], output["shape"])
            start, end = output["data_offsets"]
            first = read_header(out / output["file"]).data_start + start
            raw = _bytes_of(out, output["file"], first, end - start)
            assert hashlib.sha256(raw).hexdigest() == output["sha256"], output["name"]


@pytest.mark.parametrize("name", NAMES)
def test_the_ledger_balances(name: str, tmp_path: Path) -> None:
    source, out = make_checkpoint(tmp_path / "source", name), tmp_path / "out"
    compress(source, out)
    _check_balance(source, out)


def test_the_ledger_of_a_resumed_release_balances(tmp_path: Path) -> None:
    source, out = make_checkpoint(tmp_path / "source", "glm-5.2-fp8"), tmp_path / "out"

    def stop(progress: Progress) -> None:
        if progress.num_done_units:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        compress(source, out, progress=stop)
    assert compress(source, out).num_resumed_units
    _check_balance(source, out)


def test_a_dropped_buffer_has_its_row_and_its_reason(tmp_path: Path) -> None:
    source, out = make_checkpoint(tmp_path / "source", "deepseek-v3-fp8"), tmp_path / "out"
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file({name: torch.ones(8)}, source / "model-buffers.safetensors")
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"][name] = "model-buffers.safetensors"
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    compress(source, out)
    _check_balance(source, out)
    (row,) = [row for row in ledger_rows(out) if row["fate"] == "dropped"]
    assert (row["tensor"], row["outputs"]) == (name, [])
    assert "every engine computes" in row["reason"]


def test_every_other_reader_agrees_with_index_and_sizes(tmp_path: Path) -> None:
    source, out = make_checkpoint(tmp_path / "source", "glm-4.7-fp8"), tmp_path / "out"
    result = compress(source, out)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    sizes: dict[str, int] = {}
    for file in sorted(out.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                tensor: torch.Tensor = opened.get_tensor(name)
                sizes[name] = tensor.numel() * tensor.element_size()
                assert index["weight_map"][name] == file.name
    assert set(index["weight_map"]) == set(sizes)
    assert index["metadata"]["total_size"] == sum(sizes.values()) == result.weights_size_bytes
    assert result.total_size_bytes == sum(path.stat().st_size for path in out.iterdir())


def test_small_files_come_as_they_are(tmp_path: Path) -> None:
    source, out = make_checkpoint(tmp_path / "source", "glm-5.1-fp8"), tmp_path / "out"
    (source / "LICENSE").write_bytes(b"\xff\xfe\r\n\r\n")
    (source / "tokenizer.json").write_text('{"a": 1,\r\n "b": "\u2028"}')
    for name in PICKLES:
        (source / name).write_bytes(b"\x80\x04.")
    (source / "onnx").mkdir()
    compress(source, out)
    for name in (*COPIED, "LICENSE", "tokenizer.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes(), name
    made = {"config.json", "model.safetensors.index.json", "release.json", "ledger.jsonl"}
    weights = {path.name for path in out.glob("*.safetensors")}
    assert {path.name for path in out.iterdir()} == {*made, *weights, *COPIED, "LICENSE", "tokenizer.json"}
    release = json.loads((out / "release.json").read_text())
    skipped = {row["name"]: row["reason"] for row in release["not_copied"]}
    assert set(skipped) == {*PICKLES, "modeling_custom.py", "onnx/"}
    assert "--allow-code" in skipped["modeling_custom.py"]
    assert release["code_files"] == []


def test_code_is_copied_and_listed_when_it_is_allowed(tmp_path: Path) -> None:
    source, out = make_checkpoint(tmp_path / "source", "glm-5.1-fp8"), tmp_path / "out"
    (source / "weights.pkl").write_bytes(b"\x80\x04.")
    compress(source, out, options=memopt.PlanOptions(tensor_parallel=1, allow_code=True))
    assert (out / "modeling_custom.py").read_bytes() == (source / "modeling_custom.py").read_bytes()
    release = json.loads((out / "release.json").read_text())
    assert release["code_files"] == ["modeling_custom.py"]
    assert not (out / "weights.pkl").exists()


def test_release_json_says_what_was_done(tmp_path: Path) -> None:
    source, out = make_checkpoint(tmp_path / "source", "glm-5.2-fp8"), tmp_path / "out"
    result = compress(source, out)
    release = json.loads((out / "release.json").read_text())
    ledger = (out / "ledger.jsonl").read_bytes()
    assert release["ledger"] == {"file": "ledger.jsonl", "sha256": hashlib.sha256(ledger).hexdigest()}
    assert release["totals"]["files"] == result.num_units
    assert release["totals"]["weights_size_bytes"] == result.weights_size_bytes
    fates = Counter(row["fate"] for row in ledger_rows(out))
    assert release["totals"]["fates"] == dict(fates)
    errors = release["totals"]["error"]["routed_expert"]
    assert errors == asdict(result.errors_by_role["routed_expert"])
    assert 0 < errors["relative_mse"] < 0.02
    assert {file["name"] for file in release["source"]["files"]} == {path.name for path in source.glob("*.safetensors")}


def test_a_size_that_differs_from_the_plan_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = make_checkpoint(tmp_path / "source", "glm-5.1-fp8"), tmp_path / "out"
    from memopt.compressor import compress_job

    def longer(*arguments: Any, **options: Any) -> bytes:
        return render(*arguments, **options) + (b" " if "ledger_sha256" in options else b"")

    render = compress_job.render_release
    monkeypatch.setattr(compress_job, "render_release", longer)
    with pytest.raises(SizeMismatchError, match=r"has [\d,]+ bytes, the plan gave it") as caught:
        compress(source, out)
    assert (caught.value.file, int(caught.value.exit_code)) == ("release.json", 4)
    assert "run the same command again" in caught.value.remedy


def test_weights_whose_squares_overflow_make_a_release(tmp_path: Path) -> None:
    """Legal, and every code is right; only the sums of squares leave float32, and must not break the widths."""
    config = tiny_config("glm-5.2-fp8")
    tensors = make_tensors(skeleton_checkpoint(parse_config(json.dumps(config).encode())))
    name = "model.layers.1.mlp.experts.0.down_proj.weight"
    tensors[f"{name}_scale_inv"] *= 1e24
    source, out = write_checkpoint(tmp_path / "source", config, tensors), tmp_path / "out"
    result = compress(source, out)
    _check_balance(source, out)
    (row,) = [row for row in ledger_rows(out) if row["tensor"] == name]
    assert row["error"]["relative_mse"] == LARGEST_FIGURE == result.errors_by_role["routed_expert"].relative_mse
    assert 1e19 < row["error"]["max_error"] < 1e30
    others = [row for row in ledger_rows(out) if "error" in row and row["tensor"] != name]
    assert all(0 < row["error"]["relative_mse"] < 0.02 for row in others)
    assert compress(source, out).errors_by_role == result.errors_by_role


def test_plans_and_calls_that_cannot_run(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "glm-5.1-fp8")
    plan = memopt.plan(source, options=SMALL)
    with pytest.raises(UsageError, match="0 workers do nothing"):
        run_plan(plan, tmp_path / "out", backend=CpuBackend(), workers=0)
    config_only = memopt.plan_config(source / "config.json", options=SMALL)
    with pytest.raises(UsageError, match="has no weights"):
        run_plan(config_only, tmp_path / "out", backend=CpuBackend())
    assert not (tmp_path / "out").exists()


def test_what_is_checked_before_the_end_can_refuse(tmp_path: Path) -> None:
    source, out = make_checkpoint(tmp_path / "source", "glm-5.1-fp8"), tmp_path / "out"

    def refuse() -> None:
        assert len(list(out.glob("*.safetensors"))) == len(plan.units)
        raise UsageError("not this one")

    plan = memopt.plan(source, options=SMALL)
    with pytest.raises(UsageError, match="not this one"):
        run_plan(plan, out, backend=CpuBackend(), before_finish=refuse)
    assert not (out / "release.json").exists()
    assert run_plan(plan, out, backend=CpuBackend()).num_resumed_units == len(plan.units)
