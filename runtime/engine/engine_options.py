"""What an engine is asked to be, checked before anything is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from memopt.errors import UsageError
from memopt.kernels.kv_formats import KvFormat, kv_format
from memopt.runtime.weights.load_options import ComputeType, WeightChoice

DtypeChoice = Literal["auto", "bfloat16", "float32"]
WEIGHT_CHOICES = ("released", "bf16")
DTYPE_CHOICES = ("auto", "bfloat16", "float32")
INTEGRITY_CHOICES = ("noop", "tagged")
DEVICE_TYPES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of `Engine`, where they are described. Raises UsageError for a value that is none of the choices."""

    weights: WeightChoice = "released"
    kv_cache: str = "bf16"
    integrity: str = "noop"
    tensor_parallel: int = 1
    dtype: DtypeChoice = "auto"
    num_pages: int | None = None
    kv_cache_gib: float | None = None
    max_requests: int = 16
    max_step_tokens: int = 512
    max_tokens: int | None = None
    prefix_cache: bool = False
    speculative: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("weights", self.weights, WEIGHT_CHOICES),
            ("dtype", self.dtype, DTYPE_CHOICES),
            ("integrity", self.integrity, INTEGRITY_CHOICES),
        ):
            if value not in choices:
                raise UsageError(f"{name} is {value!r}", remedy=f"use one of {', '.join(choices)}")
        if _device_type(self.device) == "cuda" and not torch.cuda.is_available():
            raise UsageError(f"device is {self.device!r}, but there is no GPU that torch can use", remedy="use cpu")
        if self.kv_format.is_reference and _device_type(self.device) != "cpu":
            raise UsageError("the fp32 KV cache is for the CPU", remedy="use bf16, fp8_e4m3 or fp8_ds_mla")

    @property
    def kv_format(self) -> KvFormat:
        """The format of the KV cache. UsageError for an unknown name."""
        return kv_format(self.kv_cache)

    @property
    def compute(self) -> ComputeType:
        """The type of activations; "auto" is bfloat16, in which weights are stored."""
        return "float32" if self.dtype == "float32" else "bfloat16"


def _device_type(device: str) -> str:
    try:
        found = torch.device(device).type
    except RuntimeError:
        found = ""
    if found not in DEVICE_TYPES:
        raise UsageError(f"device is {device!r}", remedy=f"use one of {', '.join(DEVICE_TYPES)}")
    return found
