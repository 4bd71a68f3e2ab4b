"""GLM-4.5, 4.6, 4.7: grouped-query attention, published as per-channel FP8."""

from __future__ import annotations

from collections.abc import Iterator

from memopt.compressor.families.blocks import LayerScope, gqa_attention
from memopt.compressor.families.family import Family
from memopt.compressor.families.roles import TensorSpec
from memopt.compressor.families.text_config import TextConfig


class Glm4Moe(Family):
    name = "glm4_moe"
    mtp_has_own_embedding = True

    def attention(self, scope: LayerScope, c: TextConfig) -> Iterator[TensorSpec]:
        return gqa_attention(scope, c)
