"""A mixture-of-experts block: router, routed experts, shared expert, one sum over ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from memopt.runtime.model.experts import Experts
from memopt.runtime.model.mlp import GatedMlp
from memopt.runtime.model.model_config import MoeConfig
from memopt.runtime.model.router import Routing, route
from memopt.runtime.parallel.communicator import Communicator


@dataclass(frozen=True, slots=True)
class MoeBlock:
    """`router_weight` float32 [E, H] and `router_bias` float32 [E] of all ranks' experts; `experts` and `shared` are
    this rank's, `shared` None where the model has none.
    """

    router_weight: Tensor
    router_bias: Tensor
    config: MoeConfig
    experts: Experts
    shared: GatedMlp | None
    communicator: Communicator

    @property
    def size_bytes(self) -> int:
        """Bytes of the weights on this rank."""
        shared = 0 if self.shared is None else self.shared.size_bytes
        return self.router_weight.nbytes + self.router_bias.nbytes + self.experts.size_bytes + shared

    def routing(self, x: Tensor) -> Routing:
        """The choices for x [R, H]; float32 whatever x is."""
        return route(x.to(torch.float32), self.router_weight, self.router_bias, self.config)

    def __call__(self, x: Tensor) -> Tensor:
        """[R, H] of x [R, H], the same on all ranks."""
        total = self.experts(x, self.routing(x))
        if self.shared is not None:
            total = total + self.shared(x)
        return self.communicator.sum(total)
