"""The routed experts of a layer: an INT4 stack for one kernel, or a projection pair an expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from memopt.kernels.gemm.int4_gemm import AnyInt4Weight
from memopt.kernels.gemm.moe_gemm import moe_gemm
from memopt.runtime.model.mlp import GatedMlp
from memopt.runtime.model.router import Routing


class Experts(Protocol):
    """This rank's routed experts. Ids of other ranks' experts add nothing."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the weights."""
        ...

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        """[T, H] of x [T, H]: each token's weighted sum over its experts here, in x's type."""
        ...


@dataclass(frozen=True, slots=True)
class Int4Experts:
    """INT4 stacks [E, 2 * I, H] and [E, H, I] of experts `first_expert` and following."""

    gate_up: AnyInt4Weight
    down: AnyInt4Weight
    first_expert: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of codes and scales."""
        return self.gate_up.size_bytes + self.down.size_bytes

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        """[T, H] of x [T, H]."""
        ids = routing.expert_ids - self.first_expert if self.first_expert else routing.expert_ids
        # The builder checked the stacks; x and the routing come from the block's own products.
        return moe_gemm(x.contiguous(), self.gate_up, self.down, ids, routing.expert_weights, is_checked=True)


@dataclass(frozen=True, slots=True)
class MlpExperts:
    """Experts in BF16, float32 or FP8, `first_expert` and following, multiplied one after the other."""

    mlps: tuple[GatedMlp, ...]
    first_expert: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all experts."""
        return sum(mlp.size_bytes for mlp in self.mlps)

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        """[T, H] of x [T, H]; a token's experts are summed in float32 and in the order of its choices."""
        ids = routing.expert_ids - self.first_expert
        choices = x.new_zeros(*ids.shape, x.shape[1], dtype=torch.float32)
        is_here = (ids >= 0) & (ids < len(self.mlps))
        for expert in torch.unique(ids[is_here]).tolist():
            token, choice = (ids == expert).nonzero(as_tuple=True)
            choices[token, choice] = self.mlps[expert](x[token]).to(torch.float32)
        total = torch.zeros_like(x, dtype=torch.float32)
        for place in range(ids.shape[1]):
            total += routing.expert_weights[:, place, None] * choices[:, place]
        return total.to(x.dtype)
