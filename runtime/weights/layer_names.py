"""Which tensors a layer has, by their names below the layer. Source: docs/formats.md, "Tensor names"."""

from __future__ import annotations

from dataclasses import dataclass

from memopt.runtime.model.model_config import GqaConfig, MlaConfig, ModelConfig
from memopt.runtime.weights.load_options import LoadOptions


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Routed experts of this rank: numbers `first` to `first + count` of the model, each of one shape."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class LayerNames:
    """`linears`: modules with a weight in any form. `vectors`: tensors that are stored as they are."""

    linears: tuple[str, ...]
    vectors: tuple[str, ...]
    experts: ExpertNames | None = None


def layer_names(config: ModelConfig, layer: int, options: LoadOptions) -> LayerNames:
    """What layer number `layer` (MTP layers follow the decoder's) must have; optional tensors are not listed."""
    linears, vectors = _attention_names(config, layer)
    vectors += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    experts = None
    if layer < config.num_dense_layers:
        linears += _mlp_names("mlp")
    else:
        vectors += ["mlp.gate.weight", "mlp.gate.e_score_correction_bias"]
        experts = expert_names(config, options)
        if config.moe.num_shared_experts:
            linears += _mlp_names("mlp.shared_experts")
    if layer >= config.num_layers:
        linears += ["eh_proj"]
        vectors += ["enorm.weight", "hnorm.weight", "shared_head.norm.weight"]
    return LayerNames(tuple(linears), tuple(vectors), experts)


def top_level_names(config: ModelConfig) -> LayerNames:
    """The embedding, the final norm and the head, which a tied model does not have."""
    head = () if config.is_embedding_tied else ("lm_head",)
    return LayerNames(head, ("model.embed_tokens.weight", "model.norm.weight"))


def expert_names(config: ModelConfig, options: LoadOptions) -> ExpertNames:
    """This rank's experts: all of them, cut, or a whole E / N where they are parallel."""
    if not options.is_expert_parallel:
        return ExpertNames(0, config.moe.num_experts)
    count = config.moe.num_experts // options.communicator.num_ranks
    return ExpertNames(options.communicator.rank * count, count)


def _attention_names(config: ModelConfig, layer: int) -> tuple[list[str], list[str]]:
    attention = config.attention
    if isinstance(attention, GqaConfig):
        linears = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
        vectors = [f"{name}.bias" for name in linears[:3]] if attention.has_bias else []
        if attention.has_qk_norm:
            vectors += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
        return linears, vectors
    linears, vectors = _mla_names(attention)
    if config.has_indexer(layer):
        linears += [f"self_attn.indexer.{name}" for name in ("wq_b", "wk", "weights_proj")]
        vectors += ["self_attn.indexer.k_norm.weight", "self_attn.indexer.k_norm.bias"]
    return linears, vectors


def _mla_names(attention: MlaConfig) -> tuple[list[str], list[str]]:
    queries = ["q_proj"] if attention.q_rank is None else ["q_a_proj", "q_b_proj"]
    linears = [f"self_attn.{name}" for name in (*queries, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")]
    norms = [] if attention.q_rank is None else ["self_attn.q_a_layernorm.weight"]
    return linears, [*norms, "self_attn.kv_a_layernorm.weight"]


def _mlp_names(name: str) -> list[str]:
    return [f"{name}.{part}" for part in ("gate_proj", "up_proj", "down_proj")]
