"""How a decode kernel is cut for a GPU, and the families of GPUs that need other cuts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

# By the target that stands for each in tests/kernels/compiled: sm_90 (and below), sm_100 (and above), gfx942.
GpuFamily = Literal["hopper", "blackwell", "amd"]
BLACKWELL_CAPABILITY = 10

# Columns of a tensor-core instruction that heads fill. AMD's have 16 at least.
NARROW_HEADS = 8
WIDE_HEADS = 16


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Query heads a program, tokens a tile, warps, stages of loads in flight."""

    heads: int
    tile: int
    num_warps: int
    num_stages: int


def gpu_family(device: torch.device) -> GpuFamily:
    """The family of a CUDA or ROCm device; a CPU, in the interpreter, runs Hopper's."""
    if torch.version.hip is not None:
        return "amd"
    if device.type != "cuda":
        return "hopper"
    major, _ = torch.cuda.get_device_capability(device)
    return "blackwell" if major >= BLACKWELL_CAPABILITY else "hopper"
