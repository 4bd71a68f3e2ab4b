"""NaN and infinity are found by their bits, in every floating type, and stop a plain copy too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_checkpoints import make_checkpoint

import memopt
from memopt.compressor.checkpoint.finite import first_non_finite
from memopt.errors import NonFiniteError

TYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@pytest.mark.parametrize("dtype", sorted(TYPES))
@given(raw=st.binary(min_size=8, max_size=64).map(lambda raw: raw[: len(raw) // 8 * 8]))
def test_agrees_with_torch(dtype: str, raw: bytes) -> None:
    data = np.frombuffer(raw, np.uint8)
    finite = torch.frombuffer(bytearray(raw), dtype=TYPES[dtype]).to(torch.float64).isfinite()
    expected = None if finite.all() else int((~finite).to(torch.int32).argmax())
    assert first_non_finite(data, dtype) == expected


def test_integers_are_always_finite() -> None:
    assert first_non_finite(np.full(8, 0xFF, np.uint8), "I32") is None


@pytest.mark.parametrize("recipe", ["glm-5.2-int4", "copy"])
def test_a_nan_in_a_copied_norm_is_an_error_that_names_it(recipe: str, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "glm-5.2-fp8", num_files=1)
    (file,) = source.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"][5] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(NonFiniteError, match="element 5") as caught:
        memopt.compress(source, tmp_path / "out", recipe=recipe, options=memopt.PlanOptions(tensor_parallel=1))
    assert caught.value.tensor == "model.norm.weight"
