"""A family: an architecture's expected tensors, from its config alone."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from memopt.compressor.families.blocks import LayerScope, gated_mlp, layer_norms, moe, mtp_head, top_level
from memopt.compressor.families.roles import Role, TensorSpec
from memopt.compressor.families.text_config import TextConfig

_KV_SCALE = re.compile(r".*\.layers\.(\d{1,6})\.self_attn\.[kv]_scale")
_INV_FREQ = re.compile(r".*\.rotary_emb\.inv_freq")


class Family(ABC):
    """One architecture. Subclasses say what attention a layer has; the rest is common to all five.

    `name_prefix` stands before every text tensor's name ("language_model." in Kimi K2.5).
    `published_format`: how the published checkpoint stores its quantized weights, for plans made from a config alone.
    """

    name: ClassVar[str]
    name_prefix: ClassVar[str] = ""
    mtp_has_own_embedding: ClassVar[bool] = False

    @abstractmethod
    def attention(self, scope: LayerScope, c: TextConfig) -> Iterator[TensorSpec]:
        """The attention tensors of one layer."""

    def expected(self, c: TextConfig) -> Iterator[TensorSpec]:
        """Every tensor that a checkpoint with text sizes `c` may hold, layer by layer."""
        prefix = f"{self.name_prefix}model"
        yield from top_level(prefix, self.name_prefix, c)
        num_mtp = c.num_nextn_predict_layers
        for layer in range(c.num_hidden_layers + num_mtp):
            is_mtp = layer >= c.num_hidden_layers
            scope = LayerScope(f"{prefix}.layers.{layer}", layer, is_mtp)
            yield from layer_norms(scope, c)
            yield from self.attention(scope, c)
            if layer < c.first_k_dense_replace:
                yield from gated_mlp(scope, "mlp", c.hidden_size, c.intermediate_size, Role.DENSE_MLP)
            else:
                yield from moe(scope, c)
            if is_mtp:
                yield from mtp_head(scope, c, has_own_embedding=self.mtp_has_own_embedding)

    def extra(self, name: str, shape: tuple[int, ...]) -> TensorSpec | None:
        """The spec of a tensor that no config field fixes (a buffer, a KV scale, a vision tower); None: unknown."""
        if _INV_FREQ.fullmatch(name):
            return TensorSpec(name, shape, Role.BUFFER)
        kv_scale = _KV_SCALE.fullmatch(name)
        if kv_scale is not None:
            return TensorSpec(name, shape, Role.KV_SCALE, layer=int(kv_scale[1]))
        return None
