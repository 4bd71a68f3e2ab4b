"""What a decoder layer asks of its attention, whatever its kind."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from memopt.runtime.kv.layer_kv import LayerKv
from memopt.runtime.model.selection import Selection
from memopt.runtime.model.step_rows import StepRows


class AttentionBlock(Protocol):
    """Stores a step's keys and values, then attends to what the pages hold."""

    def __call__(
        self, x: Tensor, rows: StepRows, kv: LayerKv, selection: Selection | None, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Selection | None]:
        """Output [R, hidden] of normed x [R, hidden], and the selection that the next layers may share.

        `rope`: cosine and sine float32 [R, rope size / 2] at the rows' positions. `selection`: of the last layer with
        an indexer; None: every row attends to all of its tokens. Raises UsageError for pools of another kind.
        """
        ...
