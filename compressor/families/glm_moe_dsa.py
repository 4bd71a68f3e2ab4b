"""GLM-5, 5.1, 5.2: MLA with a DSA indexer on "full" layers."""

from __future__ import annotations

from collections.abc import Iterator

from memopt.compressor.checkpoint.model_config import CONFIG_NAME
from memopt.compressor.families.blocks import LayerScope, indexer, mla_attention
from memopt.compressor.families.family import Family
from memopt.compressor.families.roles import TensorSpec
from memopt.compressor.families.text_config import TextConfig
from memopt.errors import ConfigError

FULL = "full"
SHARED = "shared"
# transformers' GlmMoeDsaConfig default when the key is missing.
DEFAULT_SKIP_TOPK_OFFSET = 2


def has_indexer(layer: int, c: TextConfig) -> bool:
    """Whether `layer` owns an indexer: by `indexer_types`, else every `index_topk_freq`-th; an MTP layer always.

    Rule for the frequency: transformers models/glm_moe_dsa/configuration_glm_moe_dsa.py.
    """
    if layer >= c.num_hidden_layers:
        return True
    if c.indexer_types is not None:
        if len(c.indexer_types) != c.num_hidden_layers or not set(c.indexer_types) <= {FULL, SHARED}:
            raise ConfigError(
                f"indexer_types must hold {c.num_hidden_layers} entries of {FULL!r} or {SHARED!r}", file=CONFIG_NAME
            )
        return c.indexer_types[layer] == FULL
    if c.index_topk_freq is None:
        return True
    offset = DEFAULT_SKIP_TOPK_OFFSET if c.index_skip_topk_offset is None else c.index_skip_topk_offset
    return max(layer - offset + 1, 0) % c.index_topk_freq == 0


class GlmMoeDsa(Family):
    name = "glm_moe_dsa"

    def attention(self, scope: LayerScope, c: TextConfig) -> Iterator[TensorSpec]:
        yield from mla_attention(scope, c)
        if has_indexer(scope.layer, c):
            yield from indexer(scope, c)
