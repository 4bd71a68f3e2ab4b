"""One tensor's work: what comes out does not depend on how it was cut into chunks."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from memopt.compressor.checkpoint.checkpoint import Checkpoint, StoredTensor, WeightFile
from memopt.compressor.checkpoint.model_config import parse_config
from memopt.compressor.checkpoint.reader import SourceReader
from memopt.compressor.checkpoint.source_tensor import SourceFormat, SourceTensor
from memopt.compressor.checkpoint.writer import UnitFile
from memopt.compressor.families.roles import Role, TensorSpec
from memopt.compressor.ledger import TensorResult
from memopt.compressor.quantize.backend import CpuBackend
from memopt.compressor.recipe import Int4Format
from memopt.compressor.tensor_plan import Fate, OutputTensor, TensorPlan
from memopt.compressor.tensor_work import TensorWorker
from memopt.errors import ShapeError
from memopt.manifests.safetensors_header import TensorHeader, read_header, render_header

NAME = "layer.weight"


def _source(folder: Path, tensors: dict[str, torch.Tensor]) -> tuple[Checkpoint, dict[str, StoredTensor]]:
    path = folder / "model.safetensors"
    save_file(tensors, path)
    header = read_header(path)
    stored = {
        t.name: StoredTensor(t.name, path.name, t.dtype, t.shape, header.data_start + t.start, t.size_bytes)
        for t in header.tensors
    }
    files = {path.name: WeightFile(path.name, header.file_size_bytes, header.sha256)}
    return Checkpoint(folder, parse_config(b'{"model_type": "x"}'), files, stored), stored


def _run(folder: Path, checkpoint: Checkpoint, plan: TensorPlan, advanced: list[int]) -> tuple[TensorResult, bytes]:
    layout: list[TensorHeader] = []
    position = 0
    for output in plan.outputs:
        layout.append(TensorHeader(output.name, output.dtype, output.shape, position, position + output.size_bytes))
        position += output.size_bytes
    header = render_header(layout, {})
    with SourceReader(checkpoint, folder) as reader, UnitFile(folder / "out", header, tuple(layout)) as out:
        result = TensorWorker(reader, CpuBackend(), advanced.append).run(plan, out)
        out.finish()
    return result, (folder / "out").read_bytes()[len(header) :]


def _float8(
    folder: Path, rows: int, columns: int, block: tuple[int, int], seed: int
) -> tuple[Checkpoint, SourceTensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(rows, columns, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    scale = torch.rand(grid, generator=generator) + 0.5
    checkpoint, stored = _source(folder, {NAME: weight, NAME + "_scale_inv": scale})
    spec = TensorSpec(NAME, (rows, columns), Role.ROUTED_EXPERT, is_linear=True)
    return checkpoint, SourceTensor(
        spec, SourceFormat.FP8_BLOCK, stored[NAME], stored[NAME + "_scale_inv"], block=block
    )


def _plan(source: SourceTensor, fate: Fate) -> TensorPlan:
    rows, columns = source.spec.shape
    if fate is Fate.COPIED:
        return TensorPlan(source, fate, tuple(OutputTensor(p.name, p.dtype, p.shape) for p in source.parts))
    if fate is Fate.CONVERTED:
        return TensorPlan(source, fate, (OutputTensor(NAME, "BF16", (rows, columns)),))
    outputs = (
        OutputTensor("layer.weight_packed", "I32", (rows, columns // 8)),
        OutputTensor("layer.weight_scale", "BF16", (rows, columns // 32)),
        OutputTensor("layer.weight_shape", "I64", (2,)),
    )
    return TensorPlan(source, fate, outputs, Int4Format(type="int4", scale="absmax"))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 300),
    groups=st.integers(1, 8),
    block=st.sampled_from([(128, 128), (64, 32), (1, 256), (1000, 1000)]),
    chunk_bytes=st.integers(1, 50_000),
    fate=st.sampled_from([Fate.QUANTIZED, Fate.CONVERTED, Fate.COPIED]),
    seed=st.integers(0, 2**32),
)
def test_chunks_do_not_change_anything(
    rows: int, groups: int, block: tuple[int, int], chunk_bytes: int, fate: Fate, seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("chunks")
    checkpoint, source = _float8(folder, rows, groups * 32, block, seed)
    plan = _plan(source, fate)
    advanced: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuBackend, "chunk_bytes", 2**30)
        whole = _run(folder, checkpoint, plan, [])
        patch.setattr(CpuBackend, "chunk_bytes", chunk_bytes)
        cut = _run(folder, checkpoint, plan, advanced)
    assert cut == whole
    assert sum(advanced) == source.size_bytes
    raw = (folder / "model.safetensors").read_bytes()
    for part in source.parts:
        assert cut[0].source_sha256[part.name] == hashlib.sha256(raw[part.start :][: part.size_bytes]).hexdigest()


def test_dequantized_values_are_weight_times_scale(tmp_path: Path) -> None:
    checkpoint, source = _float8(tmp_path, 200, 96, (128, 64), 7)
    _, raw = _run(tmp_path, checkpoint, _plan(source, Fate.CONVERTED), [])
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "model.safetensors")
    scale = tensors[NAME + "_scale_inv"].repeat_interleave(128, 0)[:200].repeat_interleave(64, 1)[:, :96]
    expected = (tensors[NAME].float() * scale).bfloat16().view(torch.int16).numpy()
    np.testing.assert_array_equal(np.frombuffer(raw, np.int16).reshape(200, 96), expected)


def test_the_error_figures_are_those_of_the_codes(tmp_path: Path) -> None:
    checkpoint, source = _float8(tmp_path, 128, 64, (128, 128), 3)
    result, raw = _run(tmp_path, checkpoint, _plan(source, Fate.QUANTIZED), [])
    _, exact = _run(tmp_path, checkpoint, _plan(source, Fate.CONVERTED), [])
    del exact
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "model.safetensors")
    weight = (tensors[NAME].float() * tensors[NAME + "_scale_inv"][0, 0]).double().numpy()
    words = np.frombuffer(raw[: 128 * 8 * 4], np.uint32).reshape(128, 8)
    codes = ((words[:, :, None] >> (4 * np.arange(8, dtype=np.uint32))) & 15).astype(np.int64).reshape(128, 64) - 8
    bits = np.frombuffer(raw[128 * 8 * 4 :][: 128 * 2 * 2], np.uint16).astype(np.uint32) << 16
    scale = np.repeat(bits.view(np.float32).reshape(128, 2), 32, axis=1).astype(np.float64)
    error = weight - scale * codes
    assert result.errors is not None
    assert result.errors.num_weights == 128 * 64
    assert result.errors.relative_mse == pytest.approx((error**2).sum() / (weight**2).sum(), rel=1e-5)
    assert result.errors.max_error == pytest.approx(np.abs(error).max(), rel=1e-5)
    np.testing.assert_array_equal(np.frombuffer(raw[-16:], np.int64), [128, 64])


def test_advance_stops_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, source = _float8(tmp_path, 256, 64, (128, 128), 3)
    monkeypatch.setattr(CpuBackend, "chunk_bytes", 64)
    seen: list[int] = []

    class Full(list[int]):
        def append(self, num_bytes: int) -> None:
            seen.append(num_bytes)
            if len(seen) == 2:
                raise InterruptedError

    with pytest.raises(InterruptedError):
        _run(tmp_path, checkpoint, _plan(source, Fate.CONVERTED), Full())
    assert seen == [8, 128 * 64]


def _int4(folder: Path, **changes: Any) -> tuple[Checkpoint, SourceTensor]:
    tensors = {
        "layer.weight_packed": torch.zeros(4, 8, dtype=torch.int32),
        "layer.weight_scale": torch.ones(4, 2).bfloat16(),
        "layer.weight_shape": torch.tensor([4, 64]),
    } | changes
    checkpoint, stored = _source(folder, tensors)
    spec = TensorSpec(NAME, (4, 64), Role.ROUTED_EXPERT, is_linear=True)
    packed, scale, shape = (stored[f"layer.weight_{part}"] for part in ("packed", "scale", "shape"))
    return checkpoint, SourceTensor(spec, SourceFormat.INT4_PACKED, packed, scale, shape, group_size=32)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_int4_becomes_bf16(dtype: torch.dtype, tmp_path: Path) -> None:
    checkpoint, source = _int4(tmp_path, **{"layer.weight_shape": torch.tensor([4, 64], dtype=dtype)})
    _, raw = _run(tmp_path, checkpoint, _plan(source, Fate.CONVERTED), [])
    # Nibble 0 is code -8; -8.0 in BF16 is 0xC100.
    assert raw == b"\x00\xc1" * (4 * 64)


def test_a_packed_shape_that_lies_is_refused(tmp_path: Path) -> None:
    checkpoint, source = _int4(tmp_path, **{"layer.weight_shape": torch.tensor([4, 63])})
    with pytest.raises(ShapeError, match=r"holds \[4, 63\], config.json makes it \[4, 64\]") as caught:
        _run(tmp_path, checkpoint, _plan(source, Fate.CONVERTED), [])
    assert caught.value.tensor == "layer.weight_shape"
