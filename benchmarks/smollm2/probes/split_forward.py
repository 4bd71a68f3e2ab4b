"""The forward pass of a SplitModel over rows of whole windows: BF16 products, everything between them in float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.smollm2.probes.split_model import GatedWeights, SplitLayer, SplitModel, as_bfloat16
from memopt.errors import UnsupportedError
from memopt.runtime.model.model_config import GqaConfig
from memopt.runtime.model.norms import rms_norm
from memopt.runtime.model.rope import RotaryTable, apply_rope

# Rows that go through an MLP at once: what it computes of them stays in a cache.
CHUNK_ROWS = 2048


class SplitForward:
    """Rows are float32 [T, H], windows laid end to end; `lengths` are the windows' tokens and add up to T."""

    def __init__(self, model: SplitModel) -> None:
        attention = model.config.attention
        if not isinstance(attention, GqaConfig) or attention.has_bias or attention.has_qk_norm:
            raise UnsupportedError("attention other than plain GQA", remedy="use the proof model")
        self.model = model
        self._attention = attention
        self._rotary = RotaryTable(model.config.rope)
        self._eps = model.config.rms_norm_eps

    def embed(self, ids: Tensor) -> Tensor:
        """Rows of token ids int64 [T]."""
        return self.model.embedding[ids].to(torch.float32)

    def attend(self, layer: SplitLayer, x: Tensor, lengths: list[int]) -> Tensor:
        """Residual rows behind the attention of each window."""
        return torch.cat([window + self._attended(layer, window) for window in torch.split(x, lengths)])

    def mlp_inputs(self, layer: SplitLayer, x: Tensor) -> Tensor:
        """What shared and routed experts read."""
        return by_chunks(lambda rows: rms_norm(rows, layer.post_norm, self._eps), x)

    def final_rows(self, x: Tensor) -> Tensor:
        """What the head reads."""
        return rms_norm(x, self.model.norm, self._eps)

    def logits(self, rows: Tensor) -> Tensor:
        """float32 [T, V] of final rows."""
        return product(rows, self.model.head)

    def run(self, ids: Tensor, lengths: list[int], routed: tuple[GatedWeights, ...]) -> Tensor:
        """Final rows of the model with these routed experts, one a layer."""
        x = self.embed(ids)
        for layer, experts in zip(self.model.layers, routed, strict=True):
            x = self.attend(layer, x, lengths)
            z = self.mlp_inputs(layer, x)
            x = x + mlp(layer.shared, z) + mlp(experts, z)
        return self.final_rows(x)

    def _attended(self, layer: SplitLayer, window: Tensor) -> Tensor:
        sizes = self._attention
        num_tokens = window.shape[0]
        projected = product(rms_norm(window, layer.input_norm, self._eps), layer.qkv)
        heads = projected.view(num_tokens, -1, sizes.head_dim)
        query, key, value = torch.split(heads, [sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads], dim=1)
        cos, sin = self._rotary.cos_sin(torch.arange(num_tokens))
        interleaved = self.model.config.rope.is_interleaved
        query, key = (apply_rope(part.contiguous(), cos, sin, interleaved) for part in (query, key))
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            is_causal=True,
            enable_gqa=True,
            scale=sizes.softmax_scale,
        )
        return product(attended[0].transpose(0, 1).reshape(num_tokens, -1), layer.output)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """float32 x W^T, of both rounded to BF16, the sum rounded to BF16 too."""
    return (x.to(torch.bfloat16) @ weight.to(torch.bfloat16).T).to(torch.float32)


def hidden(weights: GatedWeights, z: Tensor) -> Tensor:
    """Neurons' values float32 [T, N]: what down reads."""
    cast = as_bfloat16(weights)
    return by_chunks(lambda rows: F.silu(product(rows, cast.gate)) * product(rows, cast.up), z)


def mlp(weights: GatedWeights, z: Tensor) -> Tensor:
    """The MLP's output float32 [T, H]."""
    cast = as_bfloat16(weights)
    return by_chunks(lambda rows: product(F.silu(product(rows, cast.gate)) * product(rows, cast.up), cast.down), z)


def by_chunks(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """`function` of CHUNK_ROWS rows at a time, laid end to end."""
    return torch.cat([function(chunk) for chunk in torch.split(rows, CHUNK_ROWS)])
