"""The sizes in config.json that fix a text model's tensors."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from memopt.compressor.checkpoint.model_config import CONFIG_NAME, ModelConfig
from memopt.errors import ConfigError

# Sanity bounds, far above any model (Kimi K2: 61 layers of 384 experts): a config comes from outside.
MAX_LAYERS = 4096
MAX_EXPERTS_IN_ALL = 2**18
MAX_SIZE = 2**31

Size = Annotated[int, Field(gt=0, le=MAX_SIZE)]
Count = Annotated[int, Field(ge=0, le=MAX_SIZE)]


class TextConfig(BaseModel):
    """Sizes of the text model, in elements, heads, layers or experts. Fields that a family lacks stay None."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    moe_intermediate_size: Size
    num_hidden_layers: Size
    first_k_dense_replace: Count
    n_routed_experts: Size
    n_shared_experts: Count = 0
    num_attention_heads: Size
    num_key_value_heads: Size
    num_nextn_predict_layers: Count = 0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    head_dim: Size | None = None
    use_qk_norm: bool = False
    q_lora_rank: Size | None = None
    kv_lora_rank: Size | None = None
    qk_nope_head_dim: Size | None = None
    qk_rope_head_dim: Size | None = None
    v_head_dim: Size | None = None
    index_n_heads: Size | None = None
    index_head_dim: Size | None = None
    index_topk_freq: Size | None = None
    index_skip_topk_offset: Count | None = None
    indexer_types: Annotated[tuple[str, ...] | None, Field(strict=False)] = None

    def require(self, *fields: str) -> None:
        """Raise ConfigError unless every one of `fields` has a value."""
        for field in fields:
            if getattr(self, field) is None:
                raise ConfigError(f"{field} is missing", file=CONFIG_NAME, remedy="complete config.json")


def parse_text_config(config: ModelConfig) -> TextConfig:
    """The text sizes of `config`; ConfigError naming the first field that is missing, wrong or absurd.

    A field that is null counts as missing: publishers write `n_shared_experts: null` for none.
    """
    try:
        text = TextConfig.model_validate({field: value for field, value in config.text.items() if value is not None})
    except ValidationError as problem:
        first = problem.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{field}: {first['msg'].lower()}", file=CONFIG_NAME, remedy="complete config.json") from None
    num_layers = text.num_hidden_layers + text.num_nextn_predict_layers
    if num_layers > MAX_LAYERS or num_layers * text.n_routed_experts > MAX_EXPERTS_IN_ALL:
        raise ConfigError(
            f"{num_layers:,} layers (num_hidden_layers and num_nextn_predict_layers) of {text.n_routed_experts:,} "
            f"experts (n_routed_experts): at most {MAX_LAYERS:,} and {MAX_EXPERTS_IN_ALL:,} in all are read",
            file=CONFIG_NAME,
        )
    return text
