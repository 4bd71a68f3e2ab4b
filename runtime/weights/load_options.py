"""In what form a model's weights are wanted, and on which rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from memopt.errors import UnsupportedError
from memopt.runtime.parallel.communicator import Communicator, SingleRank

ComputeType = Literal["bfloat16", "float32"]
WeightChoice = Literal["released", "bf16"]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """`compute`: the type of activations; float32 widens plain weights and makes rows independent of each other.

    `weights` "released" keeps INT4 and FP8 as they are stored, "bf16" expands them once, rounded to BF16.
    `communicator`: of N ranks, whose tensors are then this rank's cuts. `is_expert_parallel`: routed experts are not
    cut; each rank has its own contiguous E / N of them. `use_mtp`: load the multi-token prediction layers as well.
    Raises UnsupportedError for float32 on a GPU, whose kernels multiply BF16.
    """

    compute: ComputeType = "bfloat16"
    weights: WeightChoice = "released"
    device: str = "cpu"
    communicator: Communicator = field(default_factory=SingleRank)
    use_mtp: bool = False
    is_expert_parallel: bool = False

    def __post_init__(self) -> None:
        if self.compute == "float32" and torch.device(self.device).type != "cpu":
            raise UnsupportedError(
                f"float32 activations on {self.device}: the GPU kernels multiply BF16",
                remedy='use compute="bfloat16", or device="cpu"',
            )

    @property
    def dtype(self) -> torch.dtype:
        """The type of activations and of plain weights."""
        return torch.float32 if self.compute == "float32" else torch.bfloat16
