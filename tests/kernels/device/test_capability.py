"""Paths for newer devices are taken there alone."""

from __future__ import annotations

import pytest
import torch

from memopt.kernels.device import capability
from memopt.kernels.device.capability import has_capability
from memopt.kernels.gemm.planar_triton import uses_assembly

GPU = torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("found", "is_enough"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), True)]
)
def test_by_the_device(found: tuple[int, int], is_enough: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: asked.append(device) or found)
    assert has_capability(GPU, (9, 0)) == is_enough
    # sub.bf16x2 of the unpacking assembly: ptxas refuses it before sm_90.
    assert uses_assembly(GPU) == is_enough
    assert asked == [GPU, GPU]


def test_neither_on_amd_nor_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "hip", "6.4")
        assert not has_capability(GPU, (9, 0))
    monkeypatch.setattr(capability, "IS_INTERPRETED", True)
    assert not has_capability(GPU, (9, 0))
