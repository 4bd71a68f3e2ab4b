"""What capacity needs to know of a model: layers, attention, experts a token, longest length."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, ValidationError

from memopt.compressor.checkpoint.model_config import CONFIG_NAME, ModelConfig
from memopt.compressor.families.glm4_moe import Glm4Moe
from memopt.compressor.families.glm_moe_dsa import GlmMoeDsa, has_indexer
from memopt.compressor.families.registry import family_of
from memopt.compressor.families.text_config import Size, TextConfig, parse_text_config
from memopt.errors import ConfigError

# transformers' GlmMoeDsaConfig default when the key is missing.
DEFAULT_INDEX_TOPK = 2048


@dataclass(frozen=True)
class LatentAttention:
    """MLA: one latent and one rotary key a token, shared by all heads; sizes in elements.

    With a DSA indexer a query reads at most `top_k` tokens' keys, and of every token the indexer's own key, in the
    `num_indexer_layers` layers that own an indexer (MTP layers not counted). Without one these fields are 0.
    """

    num_heads: int
    latent: int
    rope: int
    nope: int
    value: int
    indexer_heads: int = 0
    indexer_key: int = 0
    top_k: int = 0
    num_indexer_layers: int = 0

    @property
    def key(self) -> int:
        """Elements of one token's cached key: latent and rotary part."""
        return self.latent + self.rope


@dataclass(frozen=True)
class GroupedAttention:
    """GQA: keys and values of `num_kv_heads` heads of `head_dim` elements a token."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


Attention = LatentAttention | GroupedAttention


@dataclass(frozen=True)
class ModelShape:
    """A model as a planner of memory sees it. `num_mtp_layers`: beside the `num_layers`.

    `experts_per_token` and `max_tokens` (max_position_embeddings) are None where config.json lacks them.
    """

    num_layers: int
    num_mtp_layers: int
    attention: Attention
    num_experts: int
    experts_per_token: int | None
    max_tokens: int | None

    @property
    def top_k(self) -> int:
        """Tokens that a DSA indexer lets a query read; 0 without an indexer."""
        return self.attention.top_k if isinstance(self.attention, LatentAttention) else 0

    @property
    def is_sparse(self) -> bool:
        """Whether a DSA indexer chooses the tokens that a query reads."""
        return self.top_k > 0

    def cached_layers(self, *, is_mtp_on: bool) -> int:
        """Layers that keep keys and values."""
        return self.num_layers + (self.num_mtp_layers if is_mtp_on else 0)


class _ServingFields(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    num_experts_per_tok: Size | None = None
    max_position_embeddings: Size | None = None
    index_topk: Size | None = None


def _serving_fields(config: ModelConfig) -> _ServingFields:
    try:
        return _ServingFields.model_validate(config.text)
    except ValidationError as problem:
        first = problem.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{field}: {first['msg'].lower()}", file=CONFIG_NAME, remedy="complete config.json") from None


def _latent_attention(text: TextConfig, top_k: int | None, *, is_sparse: bool) -> LatentAttention:
    text.require("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    if is_sparse:
        text.require("index_n_heads", "index_head_dim")
    return LatentAttention(
        num_heads=text.num_attention_heads,
        latent=text.kv_lora_rank or 0,
        rope=text.qk_rope_head_dim or 0,
        nope=text.qk_nope_head_dim or 0,
        value=text.v_head_dim or 0,
        indexer_heads=(text.index_n_heads or 0) if is_sparse else 0,
        indexer_key=(text.index_head_dim or 0) if is_sparse else 0,
        top_k=(top_k or DEFAULT_INDEX_TOPK) if is_sparse else 0,
        num_indexer_layers=sum(has_indexer(layer, text) for layer in range(text.num_hidden_layers)) if is_sparse else 0,
    )


def model_shape(config: ModelConfig) -> ModelShape:
    """The shape that config.json describes; UnsupportedError for another family, ConfigError for a wrong field."""
    text, serving = parse_text_config(config), _serving_fields(config)
    family = family_of(config).name
    attention: Attention
    if family == Glm4Moe.name:
        text.require("head_dim")
        attention = GroupedAttention(text.num_attention_heads, text.num_key_value_heads, text.head_dim or 0)
    else:
        attention = _latent_attention(text, serving.index_topk, is_sparse=family == GlmMoeDsa.name)
    return ModelShape(
        num_layers=text.num_hidden_layers,
        num_mtp_layers=text.num_nextn_predict_layers,
        attention=attention,
        num_experts=text.n_routed_experts,
        experts_per_token=serving.num_experts_per_tok,
        max_tokens=serving.max_position_embeddings,
    )
