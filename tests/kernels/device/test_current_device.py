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
PACKAGES = ("calibration", "gemm", "kv_cache")
LAUNCHING_FILES = sorted(
    path for package in PACKAGES for path in (KERNELS / package).glob("*_triton.py") if path.stem != "planar_triton"
)


def test_the_first_tensors_device_is_current_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[object] = []

    @contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        events.append(tensor)
        yield
        events.append("left")

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    first, second = torch.zeros(1), torch.zeros(2)

    @on_tensors_device
    def launch(size: int, x: torch.Tensor, *, out: torch.Tensor) -> int:
        events.append("launched")
        return size + x.numel() + out.numel()

    assert launch(4, first, out=second) == 7
    assert launch(size=4, x=second, out=first) == 7
    assert [event if isinstance(event, str) else id(event) for event in events] == [
        id(first), "launched", "left", id(second), "launched", "left",
    ]  # fmt: skip
    assert launch.__name__ == "launch"


def test_a_tensor_on_the_cpu_changes_nothing() -> None:
    assert on_tensors_device(torch.Tensor.numel)(torch.zeros(3)) == 3


def _launches(function: ast.FunctionDef) -> bool:
    """Whether `kernel[grid](...)` is called directly in it."""
    calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
    return any(
        isinstance(call.func, ast.Subscript) and ast.unparse(call.func.value).endswith("kernel") for call in calls
    )


@pytest.mark.parametrize("path", LAUNCHING_FILES, ids=lambda path: path.stem)
def test_every_launch_is_decorated(path: Path) -> None:
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    launchers = [function for function in functions if _launches(function)]
    assert launchers
    for function in launchers:
        assert [ast.unparse(decorator) for decorator in function.decorator_list] == ["on_tensors_device"], function.name
