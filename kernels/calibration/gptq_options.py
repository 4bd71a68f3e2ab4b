"""What a GPTQ solve is asked for, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from memopt.kernels.layout import GPTQ_BLOCK_COLUMNS


@dataclass(frozen=True)
class GptqOptions:
    """`damping`: share of the mean diagonal that is added to the diagonal; raised where that is not enough.

    `act_order`: columns are solved by falling diagonal of the Hessian; groups and scales stay where they are.
    `keep_better`: a row that plain rounding serves better keeps its plain codes. It costs as much again as the solve.
    `block_columns`: columns solved on the chip at a time, at most GPTQ_BLOCK_COLUMNS on a GPU; it changes the rounding
    of sums, not what is computed.
    """

    damping: float = 0.01
    act_order: bool = False
    keep_better: bool = True
    block_columns: int = GPTQ_BLOCK_COLUMNS


@dataclass(frozen=True)
class GptqResult:
    """Of E experts with R rows and K columns. Losses are (w - q) H (w - q)^T of a row under the damped Hessian.

    `codes`: int8 [E, R, K], -8..7. `loss`: float32 [E, R], of the codes given back. `plain_loss`: float32 [E, R], of
    plain rounding, None without `keep_better`. `num_plain_rows`: int64 [E], rows that kept their plain codes.
    `damping`: float64 [E] on the CPU, the share that was used. `num_dead_columns`: int64 [E] on the CPU, columns that
    no token ever reached: they are rounded to nearest.
    """

    codes: Tensor
    loss: Tensor
    plain_loss: Tensor | None
    num_plain_rows: Tensor
    damping: Tensor
    num_dead_columns: Tensor
