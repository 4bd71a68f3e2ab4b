"""What calibration collects of the inputs of a module, or of a stack of experts: tokens, second moments, Hessians.

The weights that share an input share its statistics: gate and up of an expert are one module, rows below each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from memopt.errors import ContentError, ShapeError, UsageError
from memopt.kernels.calibration.hessian import accumulate_hessian, checked_ends
from memopt.kernels.device.tensor_checks import require_tensor
from memopt.kernels.layout import CALIBRATION_CHUNK_TOKENS


@dataclass(frozen=True)
class ModuleStatistics:
    """Of E experts (1 for a dense module) with K input channels; means over an expert's tokens, zeros without tokens.

    `num_tokens`: int64 [E] on the CPU. `second_moment`: float32 [E, K], mean of x_j ** 2. `hessian`: float32 [E, K, K],
    mean of x^T x, None where only second moments were collected. `shrinkage_tokens`: how many tokens' worth of a
    broader estimate is mixed in (`shrink_statistics`).
    """

    num_tokens: Tensor
    second_moment: Tensor
    hessian: Tensor | None
    shrinkage_tokens: float = 0.0

    @property
    def num_experts(self) -> int:
        return int(self.num_tokens.shape[0])

    @property
    def num_columns(self) -> int:
        return int(self.second_moment.shape[1])

    def of_expert(self, expert: int) -> ModuleStatistics:
        """Those of one expert, still stacked: E is 1. Views."""
        one = slice(expert, expert + 1)
        hessian = None if self.hessian is None else self.hessian[one]
        return replace(self, num_tokens=self.num_tokens[one], second_moment=self.second_moment[one], hessian=hessian)


class StatisticsCollector:
    """Sums over tokens that come in batches; what comes out does not depend on how they were batched.

    An expert's tokens are summed in chunks of `chunk_tokens`, in the order in which they came. What does not fill a
    chunk waits for the next batch: up to 2 bytes * K * `chunk_tokens` an expert, beside 4 bytes * K * K of each Hessian
    and 8 bytes * K of each second moment. The same from run to run on one device; on a CPU with one number of threads.
    """

    def __init__(
        self,
        num_experts: int,
        num_columns: int,
        *,
        with_hessian: bool,
        device: str | torch.device = "cpu",
        chunk_tokens: int = CALIBRATION_CHUNK_TOKENS,
    ) -> None:
        if num_experts < 1 or num_columns < 1 or chunk_tokens < 1:
            raise UsageError(
                f"{num_experts} experts, {num_columns} columns and chunks of {chunk_tokens} tokens were asked for",
                remedy="each must be 1 or more",
            )
        self._chunk_tokens = chunk_tokens
        self._num_tokens = torch.zeros(num_experts, dtype=torch.int64)
        self._squares = torch.zeros(num_experts, num_columns, dtype=torch.float64, device=device)
        self._products = torch.zeros(num_experts, num_columns, num_columns, device=device) if with_hessian else None
        self._waiting = [torch.empty(0, num_columns, dtype=torch.bfloat16, device=device) for _ in range(num_experts)]
        self._is_finished = False

    @property
    def num_tokens(self) -> Tensor:
        """int64 [E] on the CPU: tokens so far, a copy."""
        return self._num_tokens.clone()

    def add(self, tokens: Tensor, expert_offsets: Tensor | None = None) -> None:
        """Adds tokens bfloat16 [T, K], sorted by expert; `expert_offsets` int64 [E + 1], or None for one module.

        Raises ShapeError, UsageError for what does not fit, and ContentError for a NaN or an infinite input.
        """
        if self._is_finished:
            raise UsageError("these statistics are finished", remedy="use a new collector")
        if expert_offsets is None and len(self._waiting) != 1:
            raise UsageError(
                f"tokens of {len(self._waiting)} experts came without offsets",
                remedy="pass expert_offsets, int64 [E + 1]",
            )
        num_experts, num_columns = self._squares.shape
        require_tensor("tokens", tokens, (None, num_columns), torch.bfloat16, like=self._squares)
        ends = [0, tokens.shape[0]]
        if expert_offsets is not None:
            ends = checked_ends(expert_offsets, tokens.shape[0], num_experts)
        if not bool(torch.isfinite(tokens).all()):
            raise ContentError(
                "an input of a module is NaN or infinite",
                remedy="check the source weights; calibrate in float32 if they are sound",
            )
        full: list[Tensor] = []
        for expert in range(len(self._waiting)):
            new = tokens[ends[expert] : ends[expert + 1]]
            self._num_tokens[expert] += new.shape[0]
            rows = torch.cat([self._waiting[expert], new]) if self._waiting[expert].shape[0] else new
            num_full = rows.shape[0] - rows.shape[0] % self._chunk_tokens
            full.append(rows[:num_full])
            self._waiting[expert] = rows[num_full:].clone()
        self._sum(full)

    def _sum(self, rows: list[Tensor]) -> None:
        """Adds each expert's rows, whole chunks of them or the last."""
        counts = torch.tensor([0, *(part.shape[0] for part in rows)], dtype=torch.int64)
        if int(counts.sum()) == 0:
            return
        for expert, part in enumerate(rows):
            for first in range(0, part.shape[0], self._chunk_tokens):
                chunk = part[first : first + self._chunk_tokens]
                self._squares[expert] += chunk.to(torch.float64).square_().sum(dim=0)
        if self._products is not None:
            offsets = counts.cumsum(0).to(self._squares.device)
            accumulate_hessian(self._products, torch.cat(rows), offsets, chunk_tokens=self._chunk_tokens)

    def finish(self) -> ModuleStatistics:
        """The means; the collector takes no more tokens."""
        if self._is_finished:
            raise UsageError("these statistics are finished already", remedy="keep what finish() gave")
        self._is_finished = True
        self._sum(self._waiting)
        self._waiting = []
        count = self._num_tokens.clamp(min=1).to(self._squares.device)
        if self._products is not None:
            # The sums are not needed any more, and a second copy of them would be the largest thing in memory.
            self._products.div_(count[:, None, None])
        return ModuleStatistics(self._num_tokens, (self._squares / count[:, None]).to(torch.float32), self._products)


def shrink_statistics(
    statistics: ModuleStatistics, shrinkage_tokens: float, layer: ModuleStatistics | None = None
) -> ModuleStatistics:
    """Mixes `shrinkage_tokens` tokens' worth of a broader estimate into one expert's: H' = (n H + k H_broad) / (n + k).

    `statistics`: of one expert (`of_expert`). `layer`: of all the layer's tokens (E = 1), for experts that read the
    layer's input (gate and up). None, for those that read what only they compute (down): the broad estimate is then the
    expert's own mean second moment on the diagonal. An expert without tokens gets the layer's, or stays zero.
    Raises UsageError for a negative number, ShapeError for a layer of another width or without a Hessian.
    """
    if not 0 <= shrinkage_tokens < float("inf"):
        raise UsageError(f"shrinkage_tokens is {shrinkage_tokens}", remedy="use 0 or more")
    if shrinkage_tokens == 0:
        return statistics
    broad = _own_mean(statistics) if layer is None else layer
    if (
        (broad.num_experts, statistics.num_experts) != (1, 1)
        or broad.num_columns != statistics.num_columns
        or (broad.hessian is None and statistics.hessian is not None)
    ):
        raise ShapeError(
            f"statistics of {broad.num_experts} modules with {broad.num_columns} columns are no broader estimate for "
            f"{statistics.num_experts} experts with {statistics.num_columns} columns",
            remedy="shrink one expert at a time; collect the layer's input as one module, with a Hessian where the "
            "experts have one",
        )
    share = shrinkage_tokens / (int(statistics.num_tokens) + shrinkage_tokens)
    hessian = None
    if statistics.hessian is not None and broad.hessian is not None:
        hessian = torch.lerp(statistics.hessian, broad.hessian, share)
    return replace(
        statistics,
        second_moment=torch.lerp(statistics.second_moment, broad.second_moment, share),
        hessian=hessian,
        shrinkage_tokens=float(shrinkage_tokens),
    )


def _own_mean(statistics: ModuleStatistics) -> ModuleStatistics:
    """The same with every channel as large as the mean one, and no two of them related."""
    mean = statistics.second_moment.mean(dim=1, keepdim=True).expand_as(statistics.second_moment)
    return replace(statistics, second_moment=mean, hessian=None if statistics.hessian is None else mean.diag_embed())
