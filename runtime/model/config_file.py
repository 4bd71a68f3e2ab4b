"""config.json as the figures of a model. Where a number matters and is missing, nothing is guessed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memopt.errors import ConfigError, UnsupportedError
from memopt.kernels.attention.indexer_scores import MAX_HEADS
from memopt.runtime.model.config_table import CONFIG_FILE, RopeTable, TextTable, parse_text_table, text_fields
from memopt.runtime.model.config_variants import refuse_quantization, refuse_variants
from memopt.runtime.model.model_config import (
    FamilyName,
    GqaConfig,
    IndexerConfig,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    RopeConfig,
    YarnConfig,
)
from memopt.runtime.model.rope import yarn_mscale

# Published names of the architectures; kimi_k25 is a vision model around a kimi_k2 text model.
FAMILIES: dict[str, FamilyName] = {
    "glm_moe_dsa": "glm_moe_dsa",
    "deepseek_v3": "deepseek_v3",
    "kimi_k2": "kimi_k2",
    "kimi_k25": "kimi_k25",
    "glm4_moe": "glm4_moe",
}
# Defaults of transformers' config classes where published files leave the field out.
_GLM4_ROTARY_SHARE = 0.5
# GLM's alone: DeepSeek's class assumes 8 groups of which 4, Kimi's files say 1, so that a missing field says nothing.
_FAMILIES_WITHOUT_GROUPS = ("glm_moe_dsa", "glm4_moe")
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
_BETA_FAST, _BETA_SLOW = 32.0, 1.0
# transformers GlmMoeDsaConfig.__post_init__.
_SKIP_TOPK_OFFSET = 2
_PATTERN_LETTERS = {"F": "full", "S": "shared"}
# Sanity bound far above any model, so that a hostile config cannot ask for a million layers.
_MAX_LAYERS = 4096


def parse_model_config(config: Mapping[str, Any]) -> ModelConfig:
    """The figures of a parsed config.json; `text_config` is looked into, null fields count as missing.

    Raises ConfigError naming the field that is missing, wrong or out of range, UnsupportedError for another
    architecture or a variant that no kernel computes.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError("model_type is missing", file=CONFIG_FILE, remedy="complete config.json")
    family = FAMILIES.get(model_type)
    if family is None:
        raise UnsupportedError(
            f"model_type {model_type!r} is not one of {', '.join(FAMILIES)}",
            file=CONFIG_FILE,
            remedy="serve this model with vLLM or SGLang",
        )
    fields = text_fields(config, family)
    if family in _FAMILIES_WITHOUT_GROUPS:
        fields = {**_ONE_GROUP, **{field: value for field, value in fields.items() if value is not None}}
    refuse_variants(fields, family, file=CONFIG_FILE)
    for place in (config, fields):
        refuse_quantization(place.get("quantization_config"), file=CONFIG_FILE)
    table = parse_text_table(fields)
    rope = _rope_config(table, family)
    _check_sizes(table)
    return ModelConfig(
        family=family,
        name_prefix="language_model." if family == "kimi_k25" else "",
        vocab_size=table.vocab_size,
        hidden_size=table.hidden_size,
        num_layers=table.num_hidden_layers,
        num_mtp_layers=table.num_nextn_predict_layers,
        num_dense_layers=_num_dense_layers(table),
        intermediate_size=table.intermediate_size,
        rms_norm_eps=table.rms_norm_eps,
        attention=_gqa_config(table) if family == "glm4_moe" else _mla_config(table, family, rope),
        rope=rope,
        moe=MoeConfig(
            num_experts=table.n_routed_experts,
            experts_per_token=table.num_experts_per_tok,
            intermediate_size=table.moe_intermediate_size,
            num_shared_experts=table.n_shared_experts,
            num_groups=table.need("n_group"),
            groups_per_token=table.need("topk_group"),
            is_renormalized=table.norm_topk_prob,
            routed_scaling_factor=table.routed_scaling_factor,
        ),
        max_tokens=table.max_position_embeddings,
        is_embedding_tied=table.tie_word_embeddings,
        eos_token_ids=_eos_token_ids(table),
    )


def _check_sizes(table: TextTable) -> None:
    """ConfigError for figures that do not fit each other."""
    experts, groups, chosen_groups = table.n_routed_experts, table.need("n_group"), table.need("topk_group")
    problem = ""
    if table.num_hidden_layers + table.num_nextn_predict_layers > _MAX_LAYERS:
        problem = f"num_hidden_layers is {table.num_hidden_layers:,}, more than {_MAX_LAYERS:,}"
    elif experts % groups or chosen_groups > groups:
        problem = f"{experts} experts in n_group {groups} of which topk_group {chosen_groups} are chosen"
    elif groups > 1 and experts // groups < 2:
        problem = f"n_group {groups} leaves one expert a group, but a group's two best are compared"
    elif table.num_experts_per_tok > experts // groups * chosen_groups:
        problem = f"num_experts_per_tok {table.num_experts_per_tok} of {experts // groups * chosen_groups} experts"
    elif table.num_attention_heads % table.num_key_value_heads:
        problem = f"{table.num_attention_heads} heads for num_key_value_heads {table.num_key_value_heads}"
    elif table.num_experts not in (None, experts):
        problem = f"num_experts is {table.num_experts}, but n_routed_experts {experts}"
    if problem:
        raise ConfigError(problem, file=CONFIG_FILE)


def _num_dense_layers(table: TextTable) -> int:
    num_dense = min(table.first_k_dense_replace, table.num_hidden_layers)
    wanted = ["dense"] * num_dense + ["sparse"] * (table.num_hidden_layers - num_dense)
    if table.mlp_layer_types not in (None, wanted):
        raise UnsupportedError(
            f"mlp_layer_types is not {num_dense} dense layers and then sparse ones", file=CONFIG_FILE
        )
    return num_dense


def _eos_token_ids(table: TextTable) -> tuple[int, ...]:
    ids = table.eos_token_id
    return () if ids is None else tuple(ids) if isinstance(ids, list) else (ids,)


def _gqa_config(table: TextTable) -> GqaConfig:
    head_dim = table.need("head_dim")
    return GqaConfig(
        num_heads=table.num_attention_heads,
        num_kv_heads=table.num_key_value_heads,
        head_dim=head_dim,
        has_bias=table.attention_bias,
        has_qk_norm=table.use_qk_norm,
        softmax_scale=head_dim**-0.5,
    )


def _mla_config(table: TextTable, family: FamilyName, rope: RopeConfig) -> MlaConfig:
    if table.attention_bias:
        raise UnsupportedError("attention_bias with latent attention is not computed", file=CONFIG_FILE)
    nope_size, rope_size = table.need("qk_nope_head_dim"), table.need("qk_rope_head_dim")
    scale = (nope_size + rope_size) ** -0.5
    if rope.yarn is not None and rope.yarn.mscale_all_dim:
        # transformers models/deepseek_v3/modeling_deepseek_v3.py, yarn_apply_mscale.
        scale *= yarn_mscale(rope.yarn.factor, rope.yarn.mscale_all_dim) ** 2
    return MlaConfig(
        num_heads=table.num_attention_heads,
        q_rank=table.q_lora_rank,
        latent_size=table.need("kv_lora_rank"),
        nope_size=nope_size,
        rope_size=rope_size,
        value_size=table.need("v_head_dim"),
        softmax_scale=scale,
        indexer=_indexer_config(table) if family == "glm_moe_dsa" else None,
    )


def _indexer_config(table: TextTable) -> IndexerConfig:
    """Which layers own an indexer: `indexer_types`, else a pattern, else every `index_topk_freq`-th after an offset.

    Rule: transformers models/glm_moe_dsa/configuration_glm_moe_dsa.py.
    """
    table.need("q_lora_rank")
    types, pattern = table.indexer_types, table.index_topk_pattern
    num_layers = table.num_hidden_layers
    if types is None and pattern is not None:
        types = [_PATTERN_LETTERS.get(letter, letter) for letter in pattern]
    if types is None:
        frequency = max(1 if table.index_topk_freq is None else table.index_topk_freq, 1)
        offset = _SKIP_TOPK_OFFSET if table.index_skip_topk_offset is None else table.index_skip_topk_offset
        types = ["shared" if max(layer - offset + 1, 0) % frequency else "full" for layer in range(num_layers)]
    if len(types) != num_layers or not set(types) <= {"full", "shared"} or types[0] != "full":
        raise ConfigError(f"indexer_types must be {num_layers} times full or shared, and full first", file=CONFIG_FILE)
    num_heads = table.need("index_n_heads")
    if num_heads > MAX_HEADS:
        raise UnsupportedError(
            f"index_n_heads is {num_heads}, but the indexer's kernels take {MAX_HEADS}",
            file=CONFIG_FILE,
            remedy="serve this model with vLLM or SGLang",
        )
    return IndexerConfig(
        num_heads=num_heads,
        key_size=table.need("index_head_dim"),
        top_k=table.need("index_topk"),
        layers_with_indexer=tuple(kind == "full" for kind in types),
    )


def _rope_config(table: TextTable, family: FamilyName) -> RopeConfig:
    parameters = table.rope_scaling or table.rope_parameters or RopeTable()
    theta = parameters.rope_theta or table.rope_theta
    if theta is None:
        raise ConfigError("rope_theta is missing", file=CONFIG_FILE, remedy="complete config.json")
    share = parameters.partial_rotary_factor or table.partial_rotary_factor
    if family == "glm4_moe":
        size = int(table.need("head_dim") * (_GLM4_ROTARY_SHARE if share is None else share))
    else:
        size = table.need("qk_rope_head_dim")
        if share not in (None, 1.0):
            raise UnsupportedError(f"partial_rotary_factor is {share} with latent attention", file=CONFIG_FILE)
    if size < 2 or size % 2 or (family == "glm4_moe" and size > table.need("head_dim")):
        raise ConfigError(f"{size} rotary elements are not pairs of a head", file=CONFIG_FILE)
    is_interleaved = family == "glm_moe_dsa" or (family != "glm4_moe" and table.rope_interleave)
    return RopeConfig(theta, size, is_interleaved, _yarn_config(parameters, table))


def _yarn_config(parameters: RopeTable, table: TextTable) -> YarnConfig | None:
    rope_type = parameters.rope_type or parameters.type or "default"
    if rope_type == "default":
        return None
    if rope_type != "yarn" or parameters.attention_factor is not None or not parameters.truncate:
        raise UnsupportedError(
            f"rope type {rope_type!r} (attention_factor {parameters.attention_factor}, truncate {parameters.truncate})",
            file=CONFIG_FILE,
            remedy="default and yarn, without these two, are computed",
        )
    original = parameters.original_max_position_embeddings or table.max_position_embeddings
    return YarnConfig(
        factor=parameters.factor or table.max_position_embeddings / original,
        original_max_tokens=original,
        beta_fast=parameters.beta_fast or _BETA_FAST,
        beta_slow=parameters.beta_slow or _BETA_SLOW,
        mscale=parameters.mscale or 0.0,
        mscale_all_dim=parameters.mscale_all_dim or 0.0,
    )
