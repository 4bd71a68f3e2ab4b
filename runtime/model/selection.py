"""The tokens that DSA keeps of each row's context."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Selection:
    """`positions` int32 [R, top_k]: tokens of each row's own sequence, ascending, then -1.

    Where there is None instead, no row has more than top_k tokens, and all are kept.
    """

    positions: Tensor
