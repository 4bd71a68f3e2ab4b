"""One layer: attention and MLP, each behind a norm and beside the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from memopt.runtime.kv.layer_kv import LayerKv
from memopt.runtime.model.attention_block import AttentionBlock
from memopt.runtime.model.mlp import GatedMlp
from memopt.runtime.model.moe import MoeBlock
from memopt.runtime.model.norms import rms_norm
from memopt.runtime.model.selection import Selection
from memopt.runtime.model.step_rows import StepRows


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """`input_norm` and `post_norm` [H] are weights of RMS norms with `eps`."""

    input_norm: Tensor
    attention: AttentionBlock
    post_norm: Tensor
    mlp: GatedMlp | MoeBlock
    eps: float

    def __call__(
        self, x: Tensor, rows: StepRows, kv: LayerKv, selection: Selection | None, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Selection | None]:
        """x [R, H] of the next layer, and the selection that it may share; stores the rows' keys in `kv`."""
        attended, selection = self.attention(rms_norm(x, self.input_norm, self.eps), rows, kv, selection, rope)
        x = x + attended
        return x + self.mlp(rms_norm(x, self.post_norm, self.eps)), selection
