"""Where rounding runs: numba on the CPU, Triton or torch on a CUDA device. All give the same bytes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from memopt.errors import MemoptIOError, UsageError
from memopt.kernels import cpu
from memopt.kernels.int4_spec import Int4Rows, Int4Spec

Device = Literal["auto", "cpu", "cuda"]
# On the CPU a chunk, its codes and its scales stay in a core's caches; larger ones are no faster.
CPU_CHUNK_BYTES = 2 * 2**20
# A device launches hundreds of operations a chunk, however small it is: a whole expert (GLM-5.2: 12 MiB) at once, and
# as many weights as int4_device.py rounds in a step or two.
DEVICE_CHUNK_BYTES = 32 * 2**20
_NVIDIA_CONTROL = "/dev/nvidiactl"
# Compute capability (major, minor) from which Triton compiles conversions from e4m3.
_FIRST_WITH_FP8 = (8, 9)


class QuantizeBackend(Protocol):
    """Rounds a chunk of rows to INT4; shapes and errors as `memopt.kernels.cpu.quantize_int4`.

    `chunk_bytes`: about how many bytes of source rows it wants at once. The codes do not depend on it.
    """

    name: str
    chunk_bytes: int

    def quantize(
        self,
        weight: npt.NDArray,
        block_scale: npt.NDArray[np.float32] | None,
        block: tuple[int, int] | None,
        spec: Int4Spec,
        importance: npt.NDArray[np.float32] | None = None,
    ) -> Int4Rows[npt.NDArray]: ...


class CpuBackend:
    """The numba kernels; they release the GIL, so that workers run side by side."""

    name = "cpu"
    chunk_bytes = CPU_CHUNK_BYTES

    def quantize(
        self,
        weight: npt.NDArray,
        block_scale: npt.NDArray[np.float32] | None,
        block: tuple[int, int] | None,
        spec: Int4Spec,
        importance: npt.NDArray[np.float32] | None = None,
    ) -> Int4Rows[npt.NDArray]:
        return cpu.quantize_int4(weight, block_scale, block, spec, importance)


class TorchBackend:
    """The kernels for tensors on one device ("cuda", or "cpu" in tests). MemoptIOError when its memory is full."""

    chunk_bytes = DEVICE_CHUNK_BYTES

    def __init__(self, device: str) -> None:
        self.name = device

    def quantize(
        self,
        weight: npt.NDArray,
        block_scale: npt.NDArray[np.float32] | None,
        block: tuple[int, int] | None,
        spec: Int4Spec,
        importance: npt.NDArray[np.float32] | None = None,
    ) -> Int4Rows[npt.NDArray]:
        import torch

        try:
            return self._quantize(weight, block_scale, block, spec, importance)
        except torch.OutOfMemoryError as problem:
            raise MemoptIOError(
                f"the {self.name} device has no memory left to round {weight.nbytes:,} bytes of weights"
                f" ({str(problem).splitlines()[0]})",
                remedy="free the device, or use fewer --workers or --device cpu; finished units are kept",
            ) from None

    def _quantize(
        self,
        weight: npt.NDArray,
        block_scale: npt.NDArray[np.float32] | None,
        block: tuple[int, int] | None,
        spec: Int4Spec,
        importance: npt.NDArray[np.float32] | None = None,
    ) -> Int4Rows[npt.NDArray]:
        import torch

        # torch has no arithmetic on uint16: BF16 bits travel as bfloat16.
        source = torch.from_numpy(weight if weight.dtype == np.uint8 else weight.view(np.int16))
        if weight.dtype != np.uint8:
            source = source.view(torch.bfloat16)
        scale = None if block_scale is None else torch.from_numpy(block_scale).to(self.name)
        weighting = None if importance is None else torch.from_numpy(importance).to(self.name)
        rows = device_kernel(self.name)(source.to(self.name), scale, block, spec, weighting)
        return Int4Rows(
            rows.packed.cpu().numpy(),
            rows.scale_bits.cpu().numpy().view(np.uint16),
            rows.sq_error.cpu().numpy(),
            rows.energy.cpu().numpy(),
            rows.max_error.cpu().numpy(),
            rows.num_clipped.cpu().numpy(),
        )


def device_kernel(device: str) -> Callable[..., Int4Rows]:
    """`quantize_int4` for tensors on `device`: one fused Triton kernel where it can run, else torch's operations."""
    if device.startswith("cuda") and _can_use_triton():
        from memopt.kernels import fp8_int4_triton

        return fp8_int4_triton.quantize_int4
    from memopt.kernels import int4_device

    return int4_device.quantize_int4


def _can_use_triton() -> bool:
    """True when Triton is installed, finds the C compiler that builds its launchers, and the GPU converts FP8."""
    import torch

    has_compiler = "CC" in os.environ or any(shutil.which(name) for name in ("gcc", "clang"))
    return find_spec("triton") is not None and has_compiler and torch.cuda.get_device_capability() >= _FIRST_WITH_FP8


def _has_cuda() -> bool:
    # Without a driver there is nothing to ask torch, whose import costs seconds and 200 MiB.
    if not os.path.exists(_NVIDIA_CONTROL):
        return False
    import torch

    return torch.cuda.is_available()


def choose_backend(device: Device, gpu: int | None = None) -> QuantizeBackend:
    """The backend for `device`; "auto" takes CUDA where it is there. UsageError if CUDA is asked for and absent.

    `gpu`: which one, for a rank of several; None: the process's current one.

    The speed of CUDA was never measured (docs/benchmarks.md): "cpu" may be faster on a host with many cores.
    """
    if device == "cpu":
        return CpuBackend()
    if _has_cuda():
        return TorchBackend("cuda" if gpu is None else f"cuda:{gpu}")
    if device == "cuda":
        raise UsageError("there is no CUDA device", remedy="use --device cpu")
    return CpuBackend()
