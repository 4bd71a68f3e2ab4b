"""Makes a launcher's GPU the current one: Triton compiles for, and launches on, the current device and its stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def on_tensors_device(launcher: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Decorator of what launches Triton kernels: it runs with its first tensor's GPU as the current one.

    Without it tensors on another GPU than the current one would be read by the wrong device. A tensor on the CPU (the
    interpreter) changes nothing. Wrappers have checked that all tensors are on one device.
    """

    @wraps(launcher)
    def launch(*arguments: _Parameters.args, **options: _Parameters.kwargs) -> _Result:
        first = next(value for value in (*arguments, *options.values()) if isinstance(value, Tensor))
        # A tensor on the CPU has the device -1, which leaves the current one as it is.
        with torch.cuda.device(first.get_device()):
            return launcher(*arguments, **options)

    return launch
