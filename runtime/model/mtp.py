"""A multi-token prediction layer: from a token's hidden row and the token after it, the one after that.

As transformers runs it (modeling_layers.py, MtpLayer): what goes in stands behind the decoder's final norm, what comes
out behind the layer's own. vLLM (models/deepseek_mtp.py) differs in what a second draft is made from, and zeroes the
embedding in row 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from memopt.runtime.kv.layer_kv import LayerKv
from memopt.runtime.model.decoder_layer import DecoderLayer
from memopt.runtime.model.linear import Linear
from memopt.runtime.model.norms import rms_norm
from memopt.runtime.model.rope import RotaryTable
from memopt.runtime.model.step_rows import StepRows
from memopt.runtime.model.vocabulary import Embedding, Head


@dataclass(frozen=True, slots=True)
class MtpLayer:
    """`embedding_norm`, `hidden_norm`, `norm`: RMS norm weights [H]; `projection` [H, 2 * H], the embedding first.

    `embedding` and `head` are the decoder's unless the checkpoint has copies for this layer.
    """

    embedding: Embedding
    embedding_norm: Tensor
    hidden_norm: Tensor
    projection: Linear
    layer: DecoderLayer
    norm: Tensor
    head: Head
    rotary: RotaryTable

    def forward(self, rows: StepRows, hidden: Tensor, kv: LayerKv) -> Tensor:
        """Normed rows [R, H], for `logits` and as `hidden` of a further draft; stores the rows' keys in `kv`.

        `hidden` [R, H]: `Decoder.normed` rows of tokens at `rows.positions`; `rows.token_ids` are the tokens that
        follow them. A row attends to the rows of its request up to its own position.
        """
        eps = self.layer.eps
        embedded = rms_norm(self.embedding(rows.token_ids), self.embedding_norm, eps)
        x = self.projection(torch.cat((embedded, rms_norm(hidden, self.hidden_norm, eps)), dim=-1))
        x, _ = self.layer(x, rows, kv, None, self.rotary.cos_sin(rows.positions))
        return rms_norm(x, self.norm, eps)

    def logits(self, normed: Tensor) -> Tensor:
        """float32 [N, V] of rows [N, H] from `forward`: for the token two places after the row's position."""
        return self.head(normed)
