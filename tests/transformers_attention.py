"""Attention modules of transformers with small random weights, and memopt's blocks of the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV3Config, Glm4MoeConfig, GlmMoeDsaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeAttention, Glm4MoeRotaryEmbedding
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention, GlmMoeDsaRotaryEmbedding

from memopt.runtime.model.attention_block import AttentionBlock
from memopt.runtime.model.config_file import parse_model_config
from memopt.runtime.model.model_config import ModelConfig
from memopt.runtime.weights.attention_weights import build_attention
from memopt.runtime.weights.layer_names import LayerNames
from memopt.runtime.weights.layer_tensors import LayerTensors
from memopt.runtime.weights.load_options import LoadOptions

HIDDEN_SIZE = 64


@dataclass(frozen=True)
class AttentionPair:
    """One module of transformers and what it takes to compare with it."""

    config: ModelConfig
    module: Any
    rotary: Any
    layer: int

    def block(self, options: LoadOptions | None = None) -> AttentionBlock:
        """memopt's block of the module's tensors."""
        tensors = LayerTensors(f"model.layers.{self.layer}.", LayerNames((), ()))
        for name, tensor in self.module.state_dict().items():
            tensors.add(f"self_attn.{name}", tensor.detach().clone())
        block = build_attention(self.config, self.layer, tensors, options or LoadOptions("float32"))
        tensors.finish()
        return block

    def outputs(
        self, hidden: Tensor, cache: Any = None, previous: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """transformers' output [T, hidden] of one sequence at once, and the top-k positions [T, k] that it chose."""
        count = hidden.shape[0]
        mask = torch.full((count, count), torch.finfo(hidden.dtype).min).triu(1)[None, None]
        angles = self.rotary(hidden[None], torch.arange(count)[None])
        extra = {} if previous is None else {"prev_topk_indices": previous[None]}
        with torch.no_grad():
            found = self.module(hidden[None], angles, mask, cache, **extra)
        chosen = found[2][0] if len(found) == 3 else None
        return found[0][0], chosen


class RoundedCache:
    """A cache for one pass over a sequence that gives back keys and values as a KV format would hold them."""

    def __init__(
        self, rounded: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], rounded_indexer: Callable[[Tensor], Tensor]
    ) -> None:
        self._rounded, self._rounded_indexer = rounded, rounded_indexer

    def update(self, key: Tensor, value: Tensor, layer: int, **_: Any) -> tuple[Tensor, Tensor]:
        """MLA: latent and rope [1, 1, T, .]; GQA: K and V [1, heads, T, .]."""
        return self._rounded(key, value)

    def update_indexer(self, key: Tensor, layer: int) -> Tensor:
        """[1, T, key size]."""
        return self._rounded_indexer(key)


def glm_dsa_pair(index_topk: int = 8, layer: int = 0, **changes: Any) -> AttentionPair:
    """GLM-5.x: MLA with an indexer (layer 0), or a layer that shares one (layer 1)."""
    figures = {
        **_MLA_FIGURES, "index_topk": index_topk, "index_n_heads": 16, "index_head_dim": 32,
        "indexer_types": ["full", "shared"], "mlp_layer_types": ["dense", "sparse"], **changes,
    }  # fmt: skip
    config = GlmMoeDsaConfig(**figures, attn_implementation="eager")
    return _pair(config, "GlmMoeDsaForCausalLM", GlmMoeDsaAttention, GlmMoeDsaRotaryEmbedding, layer)


def deepseek_pair(**changes: Any) -> AttentionPair:
    """Kimi K2 and DeepSeek-V3: MLA without an indexer, yarn if `rope_parameters` ask for it."""
    config = DeepseekV3Config(**{**_MLA_FIGURES, **changes}, attn_implementation="eager")
    return _pair(config, "DeepseekV3ForCausalLM", DeepseekV3Attention, DeepseekV3RotaryEmbedding)


def glm4_pair(**changes: Any) -> AttentionPair:
    """GLM-4.x: GQA with biases, norms of heads, and half of a head turned."""
    figures = {
        "vocab_size": 32, "hidden_size": HIDDEN_SIZE, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "attention_bias": True, "use_qk_norm": True,
        "partial_rotary_factor": 0.5, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "intermediate_size": 64, **changes,
    }  # fmt: skip
    config = Glm4MoeConfig(**figures, attn_implementation="eager")
    return _pair(config, "Glm4MoeForCausalLM", Glm4MoeAttention, Glm4MoeRotaryEmbedding)


def hidden_states(lengths: list[int], seed: int = 3, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Normed hidden states [T, HIDDEN_SIZE] of sequences of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, HIDDEN_SIZE, generator=generator).to(dtype) for length in lengths]


_MLA_FIGURES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": HIDDEN_SIZE, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "intermediate_size": 64, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip


def _pair(config: Any, architecture: str, module_type: Any, rotary_type: Any, layer: int = 0) -> AttentionPair:
    torch.manual_seed(11)
    module = module_type(config, layer).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            # Queries and keys large enough that attention is not flat; norms near 1.
            if "norm" in name:
                parameter.copy_(torch.rand_like(parameter) + 0.5)
            else:
                parameter.normal_(0, 0.2)
    figures = config.to_dict() | {"architectures": [architecture]}
    return AttentionPair(parse_model_config(figures), module, rotary_type(config), layer)
