"""DeepSeek-V3 and Kimi K2: MLA without an indexer."""

from __future__ import annotations

from collections.abc import Iterator

from memopt.compressor.families.blocks import LayerScope, mla_attention
from memopt.compressor.families.family import Family
from memopt.compressor.families.roles import TensorSpec
from memopt.compressor.families.text_config import TextConfig


class DeepseekV3(Family):
    name = "deepseek_v3"
    mtp_has_own_embedding = True

    def attention(self, scope: LayerScope, c: TextConfig) -> Iterator[TensorSpec]:
        return mla_attention(scope, c)


class KimiK2(DeepseekV3):
    """Kimi K2-Instruct (block FP8) and K2-Thinking (native INT4)."""

    name = "kimi_k2"
