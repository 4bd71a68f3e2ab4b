"""Every published config, field by field, as transformers understands it: from its config class and its modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_checkpoints import CONFIGS
from transformers import AutoConfig
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.glm4_moe import modeling_glm4_moe as glm4
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm_dsa

from memopt.errors import ConfigError
from memopt.manifests.strict_json import parse_json_object
from memopt.runtime.model.config_file import parse_model_config
from memopt.runtime.model.model_config import GqaConfig, MlaConfig, ModelConfig
from memopt.runtime.weights.layer_names import layer_names
from memopt.runtime.weights.load_options import LoadOptions

LAYERS: dict[str, Any] = {
    "deepseek_v3": deepseek.DeepseekV3DecoderLayer,
    "glm4_moe": glm4.Glm4MoeDecoderLayer,
    "glm_moe_dsa": glm_dsa.GlmMoeDsaDecoderLayer,
}
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))


def both(name: str) -> tuple[ModelConfig, Any]:
    table = parse_json_object((CONFIGS / f"{name}.json").read_bytes(), name, ConfigError)
    text = dict(table.get("text_config", table))
    # transformers 5.24 has no kimi_k2; the architecture, which config.json names, is DeepSeek-V3's.
    text["model_type"] = text["model_type"].replace("kimi_k2", "deepseek_v3")
    return parse_model_config(table), AutoConfig.for_model(**text)


@pytest.mark.parametrize("name", NAMES)
def test_figures(name: str) -> None:
    ours, theirs = both(name)
    assert (ours.vocab_size, ours.hidden_size, ours.num_layers) == (
        theirs.vocab_size, theirs.hidden_size, theirs.num_hidden_layers,
    )  # fmt: skip
    assert (ours.rms_norm_eps, ours.max_tokens) == (theirs.rms_norm_eps, theirs.max_position_embeddings)
    assert (ours.intermediate_size, ours.is_embedding_tied) == (theirs.intermediate_size, theirs.tie_word_embeddings)
    assert ours.num_dense_layers == theirs.first_k_dense_replace
    assert ours.num_mtp_layers == theirs.num_nextn_predict_layers
    moe = ours.moe
    assert (moe.num_experts, moe.experts_per_token) == (theirs.n_routed_experts, theirs.num_experts_per_tok)
    assert (moe.num_groups, moe.groups_per_token) == (theirs.n_group, theirs.topk_group)
    assert (moe.num_shared_experts, moe.intermediate_size) == (theirs.n_shared_experts, theirs.moe_intermediate_size)
    assert (moe.is_renormalized, moe.routed_scaling_factor) == (theirs.norm_topk_prob, theirs.routed_scaling_factor)
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    indexer = ours.attention.indexer if isinstance(ours.attention, MlaConfig) else None
    if theirs.model_type != "glm_moe_dsa":
        assert indexer is None
        return
    assert indexer is not None
    assert (indexer.num_heads, indexer.key_size) == (theirs.index_n_heads, theirs.index_head_dim)
    assert indexer.top_k == theirs.index_topk
    assert [("full" if owns else "shared") for owns in indexer.layers_with_indexer] == theirs.indexer_types


@pytest.mark.parametrize("name", NAMES)
def test_tensors_and_scale_of_layers(name: str) -> None:
    """Layers of transformers, without memory: the same tensors by name, sizes of heads, and softmax scale."""
    ours, theirs = both(name)
    theirs._attn_implementation = "eager"
    for layer in (0, ours.num_dense_layers, ours.num_dense_layers + 3):
        with torch.device("meta"):
            module = LAYERS[theirs.model_type](theirs, layer)
        attention = module.self_attn
        assert attention.scaling == pytest.approx(ours.attention.softmax_scale, rel=1e-12)
        if isinstance(ours.attention, GqaConfig):
            assert attention.k_proj.weight.shape[0] == ours.attention.num_kv_heads * ours.attention.head_dim
            assert attention.q_proj.weight.shape[0] == ours.attention.num_heads * ours.attention.head_dim
        else:
            sizes = ours.attention.nope_size + ours.attention.value_size, ours.attention.latent_size
            assert attention.kv_b_proj.weight.shape == (ours.attention.num_heads * sizes[0], sizes[1])
            assert attention.q_a_proj.weight.shape[0] == ours.attention.q_rank
            assert attention.q_a_layernorm.variance_epsilon == attention.kv_a_layernorm.variance_epsilon == 1e-6
        names = layer_names(ours, layer, LoadOptions())
        found = {name for name in module.state_dict() if ".experts." not in name}
        assert found == {*names.vectors, *(f"{module}.weight" for module in names.linears)}
        assert (names.experts is None) == (layer < ours.num_dense_layers)
