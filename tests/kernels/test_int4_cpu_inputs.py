"""What the numba path accepts, refuses and leaves alone."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from kernel_cases import as_bytes, random_source

from memopt.errors import AlignmentError, NonFiniteError, ShapeError, UsageError
from memopt.kernels import cpu, cpu_entry, int4_device, int4_reference
from memopt.kernels.checks import NonFiniteWeightError
from memopt.kernels.int4_spec import Int4Spec

SPEC = Int4Spec(32)


def test_read_only_misaligned_and_strided_input() -> None:
    source = random_source(9, 256, (128, 128), seed=1)
    expected = as_bytes(cpu.quantize_int4(source.weight, source.scale, source.block, SPEC))
    raw = b"x" + source.weight.tobytes()
    misaligned = np.frombuffer(raw, np.uint8, offset=1).reshape(source.weight.shape)
    strided = np.repeat(source.weight, 2, axis=1)[:, ::2]
    for weight in (misaligned, strided):
        assert as_bytes(cpu.quantize_int4(weight, source.scale, source.block, SPEC)) == expected


def test_one_compiled_variant_serves_all_input() -> None:
    test_read_only_misaligned_and_strided_input()
    bits = np.zeros((2, 64), np.uint16)
    cpu.quantize_int4(bits, None, None, SPEC)
    assert len(cpu_entry.quantize_entry().dispatcher.signatures) == 1


def test_threads_share_nothing() -> None:
    cases = [random_source(40, 256, (128, 128), seed=seed) for seed in range(8)]

    def run(source: Any) -> dict[str, bytes]:
        return as_bytes(cpu.quantize_int4(source.weight, source.scale, source.block, SPEC))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, cases)) == [run(source) for source in cases]


@pytest.mark.parametrize(
    ("shape", "dtype", "scale", "block", "spec", "error"),
    [
        ((4, 48), np.uint8, (1, 1), (128, 128), SPEC, AlignmentError),
        ((4, 12), np.uint8, (1, 1), (128, 128), Int4Spec(None), AlignmentError),
        ((4, 0), np.uint8, (1, 0), (128, 128), SPEC, AlignmentError),
        ((4, 64), np.uint8, (2, 1), (128, 128), SPEC, ShapeError),
        ((4, 64), np.uint8, None, (128, 128), SPEC, ShapeError),
        ((4, 64), np.uint16, (1, 1), (128, 128), SPEC, ShapeError),
        ((256,), np.uint8, (1, 1), (128, 128), SPEC, ShapeError),
        ((4, 64), np.uint8, (1, 1), (0, 128), SPEC, UsageError),
        ((4, 64), np.uint8, (1, 6), (128, 12), SPEC, UsageError),
        ((4, 64), np.uint8, (1, 1), (128, 128), Int4Spec(16), UsageError),
    ],
)
def test_refusals(shape: Any, dtype: Any, scale: Any, block: Any, spec: Int4Spec, error: type[Exception]) -> None:
    weight = np.zeros(shape, dtype)
    block_scale = None if scale is None else np.ones(scale, np.float32)
    with pytest.raises(error):
        cpu.quantize_int4(weight, block_scale, block, spec)
    tensor = torch.from_numpy(weight.view(np.int16) if dtype == np.uint16 else weight)
    tensor_scale = None if block_scale is None else torch.from_numpy(block_scale)
    for function in (int4_reference.quantize_int4, int4_device.quantize_int4):
        with pytest.raises(error):
            function(tensor, tensor_scale, block, spec)


def test_wrong_dtypes_are_refused() -> None:
    with pytest.raises(ShapeError, match="float32"):
        cpu.quantize_int4(np.zeros((4, 64), np.float32), None, None, SPEC)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="float64"):
        cpu.quantize_int4(np.zeros((4, 64), np.uint8), np.ones((1, 1)), (128, 128), SPEC)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="float64"):
        int4_device.quantize_int4(torch.zeros(4, 64, dtype=torch.float64), None, None, SPEC)


def test_no_rows_give_no_rows() -> None:
    result = cpu.quantize_int4(np.zeros((0, 64), np.uint8), np.ones((0, 1), np.float32), (128, 128), SPEC)
    assert result.packed.shape == (0, 8)
    assert result.scale_bits.shape == (0, 2)


@pytest.mark.parametrize("function", [int4_reference.quantize_int4, int4_device.quantize_int4])
@pytest.mark.parametrize("scale_search", ["absmax", "mse-signed"])
def test_no_rows_give_no_rows_in_torch(function: Any, scale_search: Any) -> None:
    spec = Int4Spec(scale_search=scale_search)
    result = function(torch.zeros(0, 64, dtype=torch.uint8), torch.ones(0, 1), (128, 128), spec)
    assert (result.packed.shape, result.scale_bits.shape, result.sq_error.shape) == ((0, 8), (0, 2), (0,))


def test_an_error_moves_with_its_chunk() -> None:
    error = NonFiniteWeightError(3, 5, 0x7F, 0.5).offset_row(128, tensor="model.w")
    assert isinstance(error, NonFiniteError)
    assert (error.row, error.column, error.tensor) == (131, 5, "model.w")
    assert "row 131, column 5" in str(error)


def test_other_sources_are_another_cache_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def misses(digest: str) -> int:
        monkeypatch.setattr(cpu_entry, "sources_key", lambda: digest)
        entry: Any = cpu_entry.scaled_bits_entry.__wrapped__()
        entry(np.zeros(8, np.uint8), np.ones(8, np.float32))
        return len(entry.dispatcher.stats.cache_misses)

    assert [misses("a"), misses("a"), misses("b"), misses("a")] == [1, 0, 1, 0]


def test_the_cache_key_names_every_numba_file() -> None:
    folder = Path(cpu_entry.__file__).parent
    compiled = {file.stem for file in folder.glob("*.py") if re.search("njit|@compiled", file.read_text())}
    assert compiled - {"compile_cache"} | {"layout", "int4_spec"} == set(cpu_entry._SOURCES)
