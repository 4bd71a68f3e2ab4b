"""Embedding and output head, whose rows (tokens) may be cut over ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from memopt.runtime.model.linear import Linear
from memopt.runtime.parallel.communicator import Communicator


@dataclass(frozen=True, slots=True)
class Embedding:
    """`weight` [V / ranks, H]: this rank's tokens, rank 0's first."""

    weight: Tensor
    communicator: Communicator

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[R, H] of token_ids int64 [R], the same on all ranks; a token of another rank is looked up there."""
        if self.communicator.num_ranks == 1:
            return self.weight[token_ids]
        local = token_ids - self.communicator.rank * self.weight.shape[0]
        is_here = (local >= 0) & (local < self.weight.shape[0])
        found = self.weight[torch.where(is_here, local, 0)]
        return self.communicator.sum(torch.where(is_here[:, None], found, 0))


@dataclass(frozen=True, slots=True)
class Head:
    """`linear` [V / ranks, H]: this rank's tokens."""

    linear: Linear
    communicator: Communicator

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits float32 [N, V] of normed hidden [N, H], the same on all ranks."""
        return self.communicator.gather_columns(self.linear(hidden)).to(torch.float32)
