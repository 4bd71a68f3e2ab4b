"""What a kernel hands to the GPU benchmark: `cases_*.py` in this folder yield `GpuCase`s from `cases()`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

GoalKind = Literal["bandwidth", "bf16_flops", "microseconds"]


@dataclass(frozen=True)
class Prepared:
    """One problem on the device.

    `run` launches the kernel into `outputs`, which the runner poisons before the correctness run (a kernel that adds to
    its output leaves `outputs` empty and sets the start itself in `check`). `check` gives the largest relative error
    against the reference, 0.0 for equal bytes; it is right up to `tolerance`. `bytes_moved` and `flops` are what the
    problem needs, not what the kernel happens to do. `peers`: name -> a rival on the same problem, if importable.
    """

    run: Callable[[], None]
    outputs: tuple[torch.Tensor, ...]
    check: Callable[[], float]
    tolerance: float
    bytes_moved: int
    flops: int = 0
    peers: Mapping[str, Callable[[], None]] = field(default_factory=dict)


@dataclass(frozen=True)
class GpuCase:
    """A named problem with its goal.

    `prepare` makes fresh random data on the generator's device. `goal` is a share of the datasheet's bandwidth
    ("bandwidth"), a share of the measured BF16 rate ("bf16_flops"), or the most microseconds it may take.
    """

    name: str
    prepare: Callable[[torch.Generator], Prepared]
    goal: float
    goal_kind: GoalKind
