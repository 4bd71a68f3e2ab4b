"""The GPU table: what the driver reports, and names that are refused with the known ones."""

from __future__ import annotations

import pytest
from refusals import refusal

from memopt.compressor.capacity.gpus import GIB, GPUS, MIB, gpu_named
from memopt.errors import UsageError


def test_an_h200_has_140_4_gib() -> None:
    assert gpu_named("h200").memory_bytes == 143_771 * MIB
    assert f"{gpu_named('H200').memory_bytes / GIB:.1f}" == "140.4"


@pytest.mark.parametrize("name", sorted(GPUS))
def test_every_gpu_is_whole_and_plausible(name: str) -> None:
    gpu = GPUS[name]
    assert gpu.name == name
    assert 40 * GIB < gpu.memory_bytes < 300 * GIB
    assert gpu.bandwidth_bytes_per_second is not None
    assert 0.8e12 <= gpu.bandwidth_bytes_per_second <= 8e12
    assert gpu.bf16_flops is not None
    # Dense FP8 is twice dense BF16 wherever there is any.
    assert gpu.fp8_flops is None or gpu.fp8_flops == pytest.approx(2 * gpu.bf16_flops, rel=0.02)
    assert gpu.source


def test_only_ampere_lacks_fp8() -> None:
    assert [name for name, gpu in GPUS.items() if gpu.fp8_flops is None] == ["a100"]


def test_an_unknown_gpu_is_refused_with_the_known_ones() -> None:
    with refusal(UsageError, "'h300'", "h200", "mi300x", "--gpu-memory"):
        gpu_named("h300")
