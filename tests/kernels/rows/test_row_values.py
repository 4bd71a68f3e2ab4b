"""Elements widened and narrowed in plain Python are those of compiled code, for every bit pattern."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from memopt.kernels.rows.row_values_cpu import narrow, widen


@njit
def widen_all(values, out):  # type: ignore[no-untyped-def]
    for i in range(values.shape[0]):
        out[i] = widen(values[i])


@njit
def narrow_all(values, out):  # type: ignore[no-untyped-def]
    for i in range(values.shape[0]):
        out[i] = narrow(values[i], out)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32], ids=["e4m3", "bf16", "float32"])
def test_widen_is_one_function(dtype: type) -> None:
    values = np.arange(256 if dtype is np.uint8 else 4096).astype(dtype)
    found = np.empty(values.shape, np.float32)
    widen_all(values, found)
    assert np.array_equal(found, np.array([widen(value) for value in values], np.float32), equal_nan=True)
    if dtype is np.uint8:
        wanted = torch.from_numpy(values).view(torch.float8_e4m3fn).float().numpy()
        assert np.array_equal(found, wanted, equal_nan=True)


@pytest.mark.parametrize("dtype", [np.uint16, np.float32], ids=["bf16", "float32"])
def test_narrow_is_one_function(dtype: type) -> None:
    values = np.random.default_rng(1).standard_normal(500).astype(np.float32)
    found = np.empty(values.shape, dtype)
    narrow_all(values, found)
    assert np.array_equal(found, np.array([narrow(value, found) for value in values], dtype))
    if dtype is np.uint16:
        wanted = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(found, wanted)
