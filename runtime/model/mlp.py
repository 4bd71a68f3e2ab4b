"""The gated MLP of dense layers and shared experts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from memopt.kernels.gemm.silu_mul import silu_mul
from memopt.runtime.model.linear import Linear


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(silu(gate(x)) * up(x)); `gate_up` [2 * I, H], the gate's rows first, `down` [H, I]."""

    gate_up: Linear
    down: Linear

    @property
    def size_bytes(self) -> int:
        """Bytes of the weights."""
        return self.gate_up.size_bytes + self.down.size_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """[R, H] of x [R, H]."""
        return self.down(silu_mul(self.gate_up(x), x.dtype))
