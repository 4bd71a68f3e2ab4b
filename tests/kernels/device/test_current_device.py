"""Launchers run on their tensors' GPU: the decorator, and that no launch of these packages goes without it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import memopt
from memopt.kernels.device.current_device import on_tensors_device

KERNELS = Path(str(memopt.__file__)).parents[1] / "kernels"
PACKAGES = (".", "attention", "calibration", "gemm", "kv_cache")
# Parts of kernels, launched from elsewhere.
WITHOUT_LAUNCHER = {
    "column_block_triton", "decode_math_triton", "gqa_decode_kernel_triton", "int4_rounding_triton",
    "int4_tiles_triton", "mla_decode_kernel_triton", "page_tiles_triton", "planar_triton",
}  # fmt: skip
TRITON_FILES = sorted(path for package in PACKAGES for path in (KERNELS / package).glob("*_triton.py"))


def test_the_first_tensors_device_is_current_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[int | str] = []

    @contextmanager
    def device(index: int) -> Iterator[None]:
        events.append(index)
        yield
        events.append("left")

    monkeypatch.setattr(torch.cuda, "device", device)
    first, second = torch.zeros(1), torch.zeros(2)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: tensor.numel() + 4)

    @on_tensors_device
    def launch(size: int, x: torch.Tensor, *, out: torch.Tensor) -> int:
        events.append("launched")
        return size + x.numel() + out.numel()

    assert launch(4, first, out=second) == 7
    assert launch(size=4, x=second, out=first) == 7
    assert events == [5, "launched", "left", 6, "launched", "left"]
    assert launch.__name__ == "launch"


def test_a_tensor_on_the_cpu_changes_nothing() -> None:
    assert on_tensors_device(torch.Tensor.numel)(torch.zeros(3)) == 3


def _launches(function: ast.FunctionDef) -> bool:
    """Whether `kernel[grid](...)` is called directly in it."""
    calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
    return any(isinstance(call.func, ast.Subscript) for call in calls)


@pytest.mark.parametrize("path", TRITON_FILES, ids=lambda path: path.stem)
def test_every_launch_is_decorated(path: Path) -> None:
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    launchers = [function for function in functions if _launches(function)]
    assert bool(launchers) == (path.stem not in WITHOUT_LAUNCHER)
    for function in launchers:
        assert [ast.unparse(decorator) for decorator in function.decorator_list] == ["on_tensors_device"], function.name
