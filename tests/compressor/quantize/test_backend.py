"""Which backend is chosen, how much it wants at once, and what it says when its device is full."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from memopt.compressor.quantize import backend
from memopt.compressor.quantize.backend import CpuBackend, TorchBackend, choose_backend, device_kernel
from memopt.errors import ExitCode, MemoptIOError, UsageError
from memopt.kernels import fp8_int4_triton, int4_device
from memopt.kernels.int4_spec import Int4Spec


def test_a_device_gets_a_whole_expert_at_once() -> None:
    assert TorchBackend("cuda").chunk_bytes >= 6144 * 2048
    assert CpuBackend().chunk_bytes < TorchBackend("cuda").chunk_bytes <= 2 * int4_device.WEIGHTS_A_STEP


def test_a_full_device_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.\nSee the documentation ...")

    monkeypatch.setattr(int4_device, "quantize_int4", full)
    with pytest.raises(MemoptIOError, match=r"device has no memory left to round 64 bytes of weights") as caught:
        TorchBackend("cpu").quantize(np.zeros((2, 32), np.uint8), np.ones((1, 1), np.float32), (128, 128), Int4Spec())
    assert caught.value.exit_code is ExitCode.IO
    assert "Tried to allocate 64.00 MiB" in caught.value.message
    assert "\n" not in str(caught.value)
    assert "--device cpu" in caught.value.remedy


def test_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_has_cuda", lambda: False)
    assert choose_backend("auto").name == choose_backend("cpu").name == "cpu"
    with pytest.raises(UsageError, match="no CUDA device"):
        choose_backend("cuda")


def test_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_has_cuda", lambda: True)
    assert [choose_backend(device).name for device in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]


@pytest.mark.parametrize(
    ("capability", "compiler", "is_fused"),
    [((9, 0), "/usr/bin/gcc", True), ((8, 0), "/usr/bin/gcc", False), ((9, 0), None, False)],
)
def test_cuda_gets_the_fused_kernel_where_triton_can_run(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], compiler: str | None, is_fused: bool
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(backend.shutil, "which", lambda name: compiler)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    fused = fp8_int4_triton.quantize_int4
    assert device_kernel("cuda") is (fused if is_fused else int4_device.quantize_int4)
    assert device_kernel("cpu") is int4_device.quantize_int4


def test_without_triton_cuda_gets_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    assert device_kernel("cuda") is int4_device.quantize_int4
