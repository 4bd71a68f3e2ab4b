"""What the GPU at hand can do, for kernels with a path of their own for newer NVIDIA devices."""

from __future__ import annotations

import torch

from memopt.kernels.device.triton_math import IS_INTERPRETED


def has_capability(device: torch.device, least: tuple[int, int]) -> bool:
    """Whether kernels for `device` are compiled for NVIDIA, compute capability `least` or newer; not interpreted."""
    if IS_INTERPRETED or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= least
