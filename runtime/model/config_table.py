"""The fields of config.json that a forward pass needs, checked one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from memopt.errors import ConfigError, UnsupportedError
from memopt.runtime.model.model_config import FamilyName

CONFIG_FILE = "config.json"
# What stands below kimi_k25.
_TEXT_MODELS = ("kimi_k2", "deepseek_v3")

Size = Annotated[int, Field(gt=0, le=2**31)]
Count = Annotated[int, Field(ge=0, le=2**31)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RopeTable(BaseModel):
    """`rope_parameters`, or the older `rope_scaling`."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    partial_rotary_factor: Positive | None = None
    factor: Positive | None = None
    original_max_position_embeddings: Size | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    mscale_all_dim: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    attention_factor: float | None = None
    truncate: bool = True


class TextTable(BaseModel):
    """The text model's table; fields that a family lacks stay None."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    moe_intermediate_size: Size
    num_hidden_layers: Size
    num_nextn_predict_layers: Count = 0
    first_k_dense_replace: Count
    num_attention_heads: Size
    num_key_value_heads: Size
    n_routed_experts: Size
    num_experts: Size | None = None
    num_experts_per_tok: Size
    n_shared_experts: Count = 0
    n_group: Size | None = None
    topk_group: Size | None = None
    norm_topk_prob: bool
    routed_scaling_factor: Positive
    rms_norm_eps: Positive
    max_position_embeddings: Size
    hidden_act: Literal["silu"] = "silu"
    scoring_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    moe_layer_freq: Literal[1] = 1
    attention_bias: bool = False
    mlp_bias: Literal[False] = False
    use_qk_norm: bool = False
    tie_word_embeddings: bool = False
    eos_token_id: Count | list[Count] | None = None
    head_dim: Size | None = None
    q_lora_rank: Size | None = None
    kv_lora_rank: Size | None = None
    qk_nope_head_dim: Size | None = None
    qk_rope_head_dim: Size | None = None
    v_head_dim: Size | None = None
    index_n_heads: Size | None = None
    index_head_dim: Size | None = None
    index_topk: Size | None = None
    index_topk_freq: Count | None = None
    index_skip_topk_offset: Count | None = None
    index_topk_pattern: str | list[str] | None = None
    indexer_types: list[str] | None = None
    mlp_layer_types: list[str] | None = None
    rope_interleave: bool = True
    rope_theta: Positive | None = None
    partial_rotary_factor: Positive | None = None
    rope_parameters: RopeTable | None = None
    rope_scaling: RopeTable | None = None

    def need(self, field: str) -> int:
        """A size that this family cannot do without. ConfigError."""
        value = getattr(self, field)
        if not isinstance(value, int):
            raise ConfigError(f"{field} is missing", file=CONFIG_FILE, remedy="complete config.json")
        return value


def text_fields(config: Mapping[str, Any], family: FamilyName) -> Mapping[str, Any]:
    """The text model's own table: the file itself, or `text_config` of Kimi K2.5, whose end tokens may stand above it.

    ConfigError where it is missing, UnsupportedError around another model, or where there should be none.
    """
    if family != "kimi_k25":
        if config.get("text_config") is not None:
            raise UnsupportedError(f"{family} with a text_config is not a text model", file=CONFIG_FILE)
        return config
    nested = config.get("text_config")
    if not isinstance(nested, Mapping):
        raise ConfigError("text_config must be a table", file=CONFIG_FILE, remedy="complete config.json")
    if nested.get("model_type") not in (None, *_TEXT_MODELS):
        raise UnsupportedError(
            f"the text model is {nested['model_type']!r}, not {' or '.join(_TEXT_MODELS)}",
            file=CONFIG_FILE,
            remedy="serve this model with vLLM or SGLang",
        )
    shared = {"eos_token_id": config.get("eos_token_id")}
    return shared | {field: value for field, value in nested.items() if value is not None}


def parse_text_table(table: Mapping[str, Any]) -> TextTable:
    """The table's fields; null counts as missing. ConfigError naming the first field that is missing or wrong,
    UnsupportedError for a variant that is not computed.
    """
    present = {
        field: {key: part for key, part in value.items() if part is not None} if isinstance(value, Mapping) else value
        for field, value in table.items()
        if value is not None
    }
    try:
        return TextTable.model_validate(present)
    except ValidationError as problem:
        first = problem.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        if first["type"] == "literal_error":
            raise UnsupportedError(
                f"{field} is {first['input']!r}, but {first['ctx']['expected']} is what is computed", file=CONFIG_FILE
            ) from None
        raise ConfigError(f"{field}: {first['msg'].lower()}", file=CONFIG_FILE, remedy="complete config.json") from None
