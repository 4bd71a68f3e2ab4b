"""What the device can do: its datasheet by name, and copy and BF16 rates measured in the same run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.gpu.timing import Stopwatch, median_seconds

# Bytes a second of memory bandwidth, from the vendors' datasheets. The first name that a device's name contains counts.
DATASHEET_BANDWIDTH: tuple[tuple[str, float], ...] = (
    ("H200", 4.8e12),
    ("GH200 480GB", 4.0e12),
    ("H100 PCIe", 2.0e12),
    ("H100 NVL", 3.9e12),
    ("H100", 3.35e12),
    ("B200", 8.0e12),
    ("MI300X", 5.3e12),
)
COPY_BYTES = 4 << 30
MATMUL_SIZE = 8192


@dataclass(frozen=True)
class Bounds:
    """`datasheet_bytes_per_second` is None for a device that is not listed."""

    device: str
    datasheet_bytes_per_second: float | None
    copy_bytes_per_second: float
    bf16_flops_per_second: float
    empty_seconds: float


def datasheet_bandwidth(device_name: str) -> float | None:
    """Bytes a second by the datasheet of the device with this name, None if it is not listed.

    "GH200" is not an "H200" and "GB200" not a "B200": a listed name must not follow another letter.
    """
    for name, rate in DATASHEET_BANDWIDTH:
        at = device_name.find(name)
        if at >= 0 and not (at > 0 and device_name[at - 1].isalnum()):
            return rate
    return None


def measure_bounds(stopwatch: Stopwatch) -> Bounds:
    """Copies COPY_BYTES (half read, half written), multiplies BF16 squares, and times an empty run.

    Its buffers are released again.
    """
    source = torch.empty(COPY_BYTES // 2, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy_seconds = median_seconds(lambda: _copy(source, target), stopwatch)
    # Random values: all-zero operands draw less power and run at a higher clock.
    a = torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=torch.bfloat16, device="cuda")
    b = torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=torch.bfloat16, device="cuda")
    product = torch.empty_like(a)
    matmul_seconds = median_seconds(lambda: _matmul(a, b, product), stopwatch)
    name = torch.cuda.get_device_name()
    return Bounds(
        device=name,
        datasheet_bytes_per_second=datasheet_bandwidth(name),
        copy_bytes_per_second=COPY_BYTES / copy_seconds,
        bf16_flops_per_second=2 * MATMUL_SIZE**3 / matmul_seconds,
        empty_seconds=median_seconds(_nothing, stopwatch),
    )


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


def _matmul(a: torch.Tensor, b: torch.Tensor, product: torch.Tensor) -> None:
    torch.matmul(a, b, out=product)


def _nothing() -> None:
    return None
