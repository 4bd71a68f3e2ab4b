"""Grouped-query attention over pages: prompt rows a chunk at a time, decode rows each as a request of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from memopt.errors import UsageError
from memopt.kernels.attention.gqa_decode import gqa_decode
from memopt.kernels.kv_cache.kv_store import gqa_store
from memopt.runtime.kv.layer_kv import GqaLayerKv, LayerKv
from memopt.runtime.model.gqa_prefill import attend_prompt_rows
from memopt.runtime.model.linear import Linear
from memopt.runtime.model.model_config import GqaConfig
from memopt.runtime.model.norms import rms_norm
from memopt.runtime.model.rope import apply_rope
from memopt.runtime.model.selection import Selection
from memopt.runtime.model.step_rows import StepRows


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of every query and key head, weights [head_dim]."""

    query: Tensor
    key: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class GqaAttention:
    """One layer; heads are those of this rank. Biases are in the projections.

    The first `rope_size` elements of a head are turned. `padded_head_dim`: a head's elements in the pools, zeros past
    the model's head_dim.
    """

    config: GqaConfig
    query: Linear
    key: Linear
    value: Linear
    norms: HeadNorms | None
    output: Linear
    rope_size: int
    is_interleaved: bool
    padded_head_dim: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the layer's attention weights."""
        norms = () if self.norms is None else (self.norms.query, self.norms.key)
        linears = (self.query, self.key, self.value, self.output)
        return sum(linear.size_bytes for linear in linears) + sum(norm.numel() * norm.element_size() for norm in norms)

    def __call__(
        self, x: Tensor, rows: StepRows, kv: LayerKv, selection: Selection | None, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Selection | None]:
        """As `AttentionBlock`; a selection is passed on as it is."""
        if not isinstance(kv, GqaLayerKv):
            raise UsageError("a GQA layer was given pools of MLA latents", remedy="make them from its own config")
        query, key, value = (self._heads(projection, x) for projection in (self.query, self.key, self.value))
        if self.norms is not None:
            query = rms_norm(query, self.norms.query, self.norms.eps)
            key = rms_norm(key, self.norms.key, self.norms.eps)
        query, key = (self._turned(part, rope) for part in (query, key))
        if kv.observer is not None:
            kv.observer.observe(key, value, rows.slots)
        query, key, value = (self._padded(part) for part in (query, key, value))
        gqa_store(key, value, kv.key_pool, kv.value_pool, rows.slots, kv.kv_format, kv.k_scale, kv.v_scale, kv.bad_slot)

        num_prompt_rows = rows.num_prefill_rows
        outputs: list[Tensor] = []
        if num_prompt_rows:
            outputs.append(attend_prompt_rows(query[:num_prompt_rows], self.config.softmax_scale, rows, kv))
        if num_prompt_rows < rows.num_rows:
            attended = gqa_decode(
                query[num_prompt_rows:], kv.key_pool, kv.value_pool, rows.block_table[num_prompt_rows:],
                rows.num_tokens[num_prompt_rows:], kv_format=kv.kv_format, k_scale=kv.k_scale, v_scale=kv.v_scale,
                softmax_scale=self.config.softmax_scale,
            )  # fmt: skip
            outputs.append(attended.output)
        heads = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return self.output(heads[:, :, : self.config.head_dim].flatten(1)), selection

    def _heads(self, projection: Linear, x: Tensor) -> Tensor:
        """[R, heads, head_dim]."""
        return projection(x).view(x.shape[0], -1, self.config.head_dim)

    def _turned(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """`x` [R, heads, head_dim] with the first elements of every head turned."""
        turned = apply_rope(x[..., : self.rope_size], *rope, self.is_interleaved)
        return torch.cat((turned, x[..., self.rope_size :]), dim=2)

    def _padded(self, x: Tensor) -> Tensor:
        """`x` [R, heads, head_dim] with zeros behind every head up to the pools' size, contiguous."""
        return pad(x, (0, self.padded_head_dim - self.config.head_dim)).contiguous()
