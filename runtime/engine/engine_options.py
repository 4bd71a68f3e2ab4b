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
WHOLE_NUMBERS = ("tensor_parallel", "max_requests", "max_step_tokens")
OPTIONAL_WHOLE_NUMBERS = ("num_pages", "max_tokens")
SWITCHES = ("prefix_cache", "speculative")


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
        for name in WHOLE_NUMBERS:
            if not _is_whole(getattr(self, name)):
                raise UsageError(f"{name} is {getattr(self, name)!r}", remedy="use a whole number")
        for name in OPTIONAL_WHOLE_NUMBERS:
            if not (getattr(self, name) is None or _is_whole(getattr(self, name))):
                raise UsageError(f"{name} is {getattr(self, name)!r}", remedy="use a whole number, or leave it out")
        if not (self.kv_cache_gib is None or isinstance(self.kv_cache_gib, int | float)):
            raise UsageError(f"kv_cache_gib is {self.kv_cache_gib!r}", remedy="use a number, or leave it out")
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} is {getattr(self, name)!r}", remedy="use True or False")
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


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _device_type(device: str) -> str:
    try:
        found = torch.device(device).type
    except (RuntimeError, TypeError):
        found = ""
    if found not in DEVICE_TYPES:
        raise UsageError(f"device is {device!r}", remedy=f"use one of {', '.join(DEVICE_TYPES)}")
    return found
