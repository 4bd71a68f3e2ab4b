"""What is refused when a tensor is expanded is refused when it is copied: NaN scales, shapes that lie, overflow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_checkpoints import make_tensors, tiny_config, write_checkpoint
from tiny_plans import checkpoint_of

import memopt
from memopt.compressor.quantize.backend import CpuBackend
from memopt.errors import MemoptError, NonFiniteError, ShapeError

OPTIONS = memopt.PlanOptions(tensor_parallel=1)


def spoilt(folder: Path, checkpoint: str, ending: str, value: torch.Tensor) -> tuple[Path, str]:
    """A tiny checkpoint with the first tensor of that ending replaced by `value` of its shape, and its name."""
    config = tiny_config(checkpoint)
    tensors = make_tensors(checkpoint_of(config))
    name = next(name for name in tensors if name.endswith(ending))
    tensors[name] = value.expand(tensors[name].shape).clone()
    return write_checkpoint(folder / "source", config, tensors), name


@pytest.mark.parametrize("dtype", ["U8", "F8_E8M0"])
@pytest.mark.parametrize("by", ["copy", "dequantize"])
def test_a_ue8m0_scale_that_is_nan(by: str, dtype: str, tmp_path: Path) -> None:
    value = torch.tensor(0xFF, dtype=torch.uint8)
    if dtype == "F8_E8M0":
        value = value.view(torch.float8_e8m0fnu)
    source, name = spoilt(tmp_path, "glm-5.2-fp8", "weight_scale_inv", value)
    with pytest.raises(NonFiniteError) as caught:
        memopt.compress(source, tmp_path / "out", recipe=by, options=OPTIONS, device="cpu")
    assert (caught.value.tensor, caught.value.file) == (name, "model-00001-of-000002.safetensors")


@pytest.mark.parametrize("byte", [0, 254])
def test_ue8m0_scales_that_are_numbers_are_copied(byte: int, tmp_path: Path) -> None:
    source, _ = spoilt(tmp_path, "glm-5.2-fp8", "weight_scale_inv", torch.tensor(byte, dtype=torch.uint8))
    memopt.compress(source, tmp_path / "out", recipe="copy", options=OPTIONS, device="cpu")


@pytest.mark.parametrize(
    ("ending", "value", "error"),
    [
        ("weight_shape", torch.tensor([7, 9]), ShapeError),
        ("weight_shape", torch.tensor([7, 9], dtype=torch.int32), ShapeError),
        ("weight_scale", torch.tensor(float("nan"), dtype=torch.bfloat16), NonFiniteError),
        # Finite, but not times -8.
        ("weight_scale", torch.tensor(1e38, dtype=torch.bfloat16), NonFiniteError),
    ],
)
@pytest.mark.parametrize("by", ["kimi-k2.6", "copy", "dequantize"])
@pytest.mark.parametrize("chunk_bytes", [1, 2**21])
def test_native_int4_that_cannot_be_expanded(
    ending: str, value: torch.Tensor, error: type[MemoptError], by: str, chunk_bytes: int,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(CpuBackend, "chunk_bytes", chunk_bytes)
    source, name = spoilt(tmp_path, "kimi-k2.6-int4", ending, value)
    with pytest.raises(error) as caught:
        memopt.compress(source, tmp_path / "out", recipe=by, options=OPTIONS, device="cpu")
    assert (caught.value.tensor, caught.value.file) == (name, "model-00001-of-000002.safetensors")
