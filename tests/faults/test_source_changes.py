"""A source that changes, shrinks or holds NaN while it is read: a named error, and nothing final is written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cli.invoke import invoke
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_checkpoints import make_checkpoint

import memopt
from faults.small_source import EXPERT, EXPERT_SCALE, FLAGS, OPTIONS, compress, edit_tensor, file_of
from faults.trees import tree
from memopt.compressor.pipeline import run_plan
from memopt.compressor.progress import Progress
from memopt.compressor.quantize.backend import CpuBackend
from memopt.errors import MemoptError, NonFiniteError, SourceChangedError, TruncatedError
from memopt.manifests.safetensors_header import read_header

# The last tensor that the small source's plan reads.
LAST = "model.layers.2.mlp.experts.3.down_proj.weight"
E4M3_NAN = 0x7F


def _once(change: Callable[[], object]) -> Callable[[Progress], None]:
    """A progress callback that makes `change` when the first unit is finished."""
    made: list[bool] = []

    def callback(progress: Progress) -> None:
        if progress.num_done_units and not made:
            made.append(True)
            change()

    return callback


def _require_nothing_final(out: Path) -> None:
    assert not (out / "release.json").exists()
    assert not (out / "ledger.jsonl").exists()
    assert (out / ".memopt").is_dir()


def test_weights_changed_while_running(source: Path, reference: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    whole = file_of(source, LAST)[0].read_bytes()
    change = _once(lambda: edit_tensor(source, LAST, lambda raw: raw.__setitem__(0, raw[0] ^ 1)))
    with pytest.raises(SourceChangedError, match="was changed while it was read") as caught:
        compress(source, out, progress=change)
    path = file_of(source, LAST)[0]
    assert (caught.value.file, caught.value.code, int(caught.value.exit_code)) == (
        path.name,
        "MEMOPT_SOURCE_CHANGED",
        4,
    )
    _require_nothing_final(out)
    path.write_bytes(whole)
    # The unit that read the changed bytes is finished, and is found out.
    with pytest.raises(SourceChangedError, match="differs from what the interrupted run read") as again:
        compress(source, out)
    assert again.value.tensor == LAST


def test_a_file_replaced_while_running(source: Path, reference: dict[str, str], tmp_path: Path) -> None:
    """A download tool renames a new file over the old: what was read is no longer what the folder holds."""
    path = file_of(source, LAST)[0]
    out = tmp_path / "out"
    whole = path.read_bytes()

    def replace() -> None:
        (tmp_path / "new").write_bytes(bytes(len(whole)))
        os.replace(tmp_path / "new", path)

    with pytest.raises(SourceChangedError, match="was changed while it was read") as caught:
        compress(source, out, progress=_once(replace))
    assert caught.value.file == path.name
    _require_nothing_final(out)
    path.write_bytes(whole)
    compress(source, out)
    assert tree(out) == reference


def test_a_file_truncated_while_running(source: Path, tmp_path: Path) -> None:
    path, start, _ = file_of(source, LAST)
    header = read_header(path)
    ends = {tensor.name: header.data_start + tensor.end for tensor in header.tensors}
    out = tmp_path / "out"
    with pytest.raises(TruncatedError, match=r"the file ends at byte [\d,]+, inside the tensor") as caught:
        compress(source, out, progress=_once(lambda: os.truncate(path, start + 10)))
    assert (caught.value.file, caught.value.code, int(caught.value.exit_code)) == (path.name, "MEMOPT_TRUNCATED", 8)
    assert caught.value.tensor is not None
    assert ends[caught.value.tensor] > start + 10
    _require_nothing_final(out)


def _resize(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _other_header_of_the_same_size(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"format":"pt"', b'"format":"tp"', 1))


def _no_header(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


@pytest.mark.parametrize("change", [_resize, _other_header_of_the_same_size, _no_header])
def test_a_file_changed_between_plan_and_run(change: Callable[[Path], None], source: Path, tmp_path: Path) -> None:
    plan = memopt.plan(source, options=OPTIONS)
    path = file_of(source, EXPERT)[0]
    change(path)
    with pytest.raises(SourceChangedError, match="planned") as caught:
        run_plan(plan, tmp_path / "out", backend=CpuBackend())
    assert caught.value.file == path.name


def test_a_small_file_changed_between_plan_and_run(source: Path, tmp_path: Path) -> None:
    plan = memopt.plan(source, options=OPTIONS)
    (source / "tokenizer_config.json").write_text("{}")
    with pytest.raises(SourceChangedError, match="was changed since it was planned") as caught:
        run_plan(plan, tmp_path / "out", backend=CpuBackend())
    assert caught.value.file == "tokenizer_config.json"


def test_a_nan_weight_is_named_with_its_place(source: Path, tmp_path: Path) -> None:
    path = edit_tensor(source, EXPERT, lambda raw: raw.__setitem__(70 * 128 + 9, E4M3_NAN))
    out = tmp_path / "out"
    refused = invoke("compress", source, out, *FLAGS, "--json")
    assert refused.code == 4
    assert (refused.verdict["code"], refused.verdict["tensor"], refused.verdict["file"]) == (
        "MEMOPT_NONFINITE", EXPERT, path.name,
    )  # fmt: skip
    assert "row 70, column 9 is not a finite number (FP8 bits 0x7F" in refused.refusal
    assert EXPERT in refused.refusal
    assert path.name in refused.refusal
    _require_nothing_final(out)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_scale_that_is_not_finite_is_named(bad: float, source: Path, tmp_path: Path) -> None:
    edit_tensor(source, EXPERT_SCALE, lambda raw: raw.__setitem__(slice(0, 4), np.float32(bad).tobytes()))
    with pytest.raises(NonFiniteError, match=f"scale 0 of 1 is {bad}") as caught:
        compress(source, tmp_path / "out")
    assert caught.value.tensor == EXPERT_SCALE
    _require_nothing_final(tmp_path / "out")


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    row=st.integers(0, 255),
    column=st.integers(0, 127),
    chunk_bytes=st.sampled_from([128, 4096, 20_000, 2**21]),
    tensor=st.sampled_from(["gate_proj", "up_proj"]),
)
def test_the_row_is_right_in_every_chunk(
    row: int, column: int, chunk_bytes: int, tensor: str, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Dense MLP weights, 256 x 128 in blocks of 128 rows: FP8 to BF16, in one chunk or several."""
    name = f"model.layers.0.mlp.{tensor}.weight"
    path, start, _ = file_of(source, name)
    whole = path.read_bytes()
    place = start + row * 128 + column
    path.write_bytes(whole[:place] + bytes([E4M3_NAN]) + whole[place + 1 :])
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CpuBackend, "chunk_bytes", chunk_bytes)
            with pytest.raises(NonFiniteError, match=f"row {row}, column {column} ") as caught:
                compress(source, tmp_path_factory.mktemp("out"))
    finally:
        path.write_bytes(whole)
    assert caught.value.tensor == name


def test_the_row_is_right_past_the_first_real_chunk(tmp_path: Path) -> None:
    """A routed expert of 3 MiB is more than one chunk: INT4, at the real chunk size."""
    source = make_checkpoint(
        tmp_path / "source", "glm-5.1-fp8", moe_intermediate_size=12288, n_routed_experts=2, num_hidden_layers=2,
        num_nextn_predict_layers=0,
    )  # fmt: skip
    row = CpuBackend.chunk_bytes // 256 + 1234
    edit_tensor(source, EXPERT, lambda raw: raw.__setitem__(row * 256 + 255, E4M3_NAN | 0x80))
    with pytest.raises(NonFiniteError, match=rf"row {row}, column 255 .*FP8 bits 0xFF") as caught:
        compress(source, tmp_path / "out")
    assert caught.value.tensor == EXPERT


@pytest.mark.parametrize("bits", [0x7FC0, 0x7F80, 0xFF80])
def test_a_bf16_expert_that_is_not_finite_is_named(bits: int, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "glm-5.1-fp8")
    bf16 = tmp_path / "bf16"
    memopt.dequantize(source, bf16)
    edit_tensor(bf16, EXPERT, lambda raw: raw.__setitem__(slice(512, 514), np.uint16(bits).tobytes()))
    with pytest.raises(NonFiniteError, match=f"row 1, column 0 is not a finite number .BF16 bits 0x{bits:04X}"):
        compress(bf16, tmp_path / "out", recipe="glm-5.1-int4")


@pytest.mark.parametrize("bits", [0x7FC0, 0xFF80, 0x7F7F])
def test_an_int4_scale_that_gives_no_number_is_named(bits: int, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "kimi-k2.6-int4")
    name = "language_model.model.layers.1.mlp.experts.0.gate_proj.weight_scale"
    edit_tensor(source, name, lambda raw: raw.__setitem__(slice(6, 8), np.uint16(bits).tobytes()))
    with pytest.raises(MemoptError, match="scale 3 of 2048 is ") as caught:
        memopt.dequantize(source, tmp_path / "out")
    assert (caught.value.code, caught.value.tensor) == ("MEMOPT_NONFINITE", name)
