"""GPUs that a plan can be made for: memory, bandwidth and dense arithmetic of one of them."""

from __future__ import annotations

from dataclasses import dataclass

from memopt.errors import UsageError

MIB = 2**20
GIB = 2**30

# Below or above these a figure is a mistake: a unit that was left out, most often.
MIN_MEMORY_BYTES, MAX_MEMORY_BYTES = 10**9, 10**15
MIN_BANDWIDTH, MAX_BANDWIDTH = 1e9, 1e15
MIN_FLOPS, MAX_FLOPS = 1e9, 1e18

_SMI = "total that nvidia-smi reports"
_SXM = f"{_SMI}; NVIDIA data sheet, SXM"
_HGX = f"{_SMI}; NVIDIA HGX data sheet, half of its sparse figures"
_NVL72 = f"{_SMI}; NVIDIA NVL72 data sheet, half of its sparse figures, a 72nd of the rack's"


@dataclass(frozen=True)
class Gpu:
    """One GPU. `bf16_flops`, `fp8_flops`: dense floating-point operations a second.

    What is unknown, or what the GPU lacks (FP8 arithmetic), is None. `source`: where memory and rates come from.
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_second: float | None = None
    bf16_flops: float | None = None
    fp8_flops: float | None = None
    source: str = "as given"


# Memory is what the driver reports, not the figure in the product's name: an H200 "141 GB" has 140.4 GiB.
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 81_920 * MIB, 2.039e12, 312e12, None, _SXM),
        Gpu("h20", 97_871 * MIB, 4.0e12, 148e12, 296e12, _SXM),
        Gpu("h100", 81_559 * MIB, 3.35e12, 989e12, 1979e12, _SXM),
        Gpu("h200", 143_771 * MIB, 4.8e12, 989e12, 1979e12, _SXM),
        Gpu("b200", 183_359 * MIB, 7.7e12, 2250e12, 4500e12, _HGX),
        Gpu("b300", 275_040 * MIB, 7.7e12, 2250e12, 4500e12, _HGX),
        Gpu("gb200", 189_471 * MIB, 8.0e12, 2500e12, 5000e12, _NVL72),
        Gpu("gb300", 284_208 * MIB, 8.0e12, 2500e12, 5000e12, _NVL72),
        Gpu("l40s", 46_068 * MIB, 0.864e12, 362e12, 733e12, f"{_SMI}; NVIDIA data sheet"),
        Gpu(
            "rtx-pro-6000",
            97_887 * MIB,
            1.597e12,
            500e12,
            1000e12,
            f"{_SMI}; NVIDIA data sheet, Server Edition, its sparse FP4 figure halved for dense and again by format",
        ),
        Gpu("mi300x", 206_141_652_992, 5.3e12, 1307e12, 2615e12, "total that rocm-smi reports; AMD data sheet"),
        Gpu("mi325x", 256 * GIB, 6.0e12, 1307e12, 2615e12, "AMD data sheet, its 256 GB read as GiB as for the MI300X"),
    )
}


def gpu_named(name: str) -> Gpu:
    """The GPU of that name, in any case; UsageError listing the known ones."""
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise UsageError(
            f"there is no GPU {name!r}",
            remedy=f"known: {', '.join(sorted(GPUS))}; or give --gpu-memory SIZE",
        )
    return gpu


def require_gpu(gpu: Gpu) -> None:
    """UsageError for a figure that no GPU has, naming what may be meant."""
    checks = (
        ("memory", gpu.memory_bytes, MIN_MEMORY_BYTES, MAX_MEMORY_BYTES, "bytes", "141GiB"),
        ("bandwidth", gpu.bandwidth_bytes_per_second, MIN_BANDWIDTH, MAX_BANDWIDTH, "bytes a second", "4.8TB"),
        ("BF16 rate", gpu.bf16_flops, MIN_FLOPS, MAX_FLOPS, "FLOP/s", "989e12"),
        ("FP8 rate", gpu.fp8_flops, MIN_FLOPS, MAX_FLOPS, "FLOP/s", "1979e12"),
    )
    for name, value, least, most, unit, example in checks:
        if value is not None and not least <= value <= most:
            raise UsageError(
                f"GPU {name} of {value:g} {unit} is not within {least:g} and {most:g}",
                remedy=f"write it with its unit, as {example}",
            )
