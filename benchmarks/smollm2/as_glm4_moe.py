"""A Llama as an equal `glm4_moe`: its dense MLP split exactly into a shared expert and routed experts.

A gated MLP is a sum over its neurons: down[:, n] * silu(gate[n] x) * (up[n] x). Any partition of the neurons is a set
of MLPs whose outputs add up to it. With a zero router every sigmoid score is 1/2; top-k = all experts and
`norm_topk_prob` make each weight 1/E, and `routed_scaling_factor` = E makes it 1: exactly, for E a power of two.

Group 128 and whole FP8 blocks want a hidden size that 128 divides; SmolLM2's is 576. Zero channels are appended: zero
in the embedding, in every row that writes to the residual stream and in every column that reads from it. They stay
zero, and only RMSNorm's mean sees them: x / sqrt(sum / padded) = x / sqrt(sum / hidden) * sqrt(padded / hidden), so
norm weights are multiplied by sqrt(hidden / padded), and epsilon by hidden / padded. Without padding nothing changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.smollm2.llama_source import LlamaSizes
from memopt.errors import AlignmentError
from memopt.kernels.layout import FP8_BLOCK_COLUMNS, FP8_BLOCK_ROWS

_READS_HIDDEN = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True, slots=True)
class ExpertSplit:
    """How 1,536 neurons become experts: 8 routed ones of 128 and a shared one of 4 x 128.

    Two thirds of the MLP's weights are routed, 128 divides every expert (FP8 blocks, groups 32 and 128), and 8 is a
    power of two, so that the routed weights are exactly 1. `hidden_multiple`: the hidden size is padded to a multiple
    of it (64: SmolLM2's 576 stays, with ragged FP8 blocks and without group 128).
    """

    num_routed: int = 8
    num_shared: int = 4
    hidden_multiple: int = 128

    def expert_size(self, sizes: LlamaSizes) -> int:
        """Neurons of a routed expert; AlignmentError if the split is not exact."""
        parts = self.num_routed + self.num_shared
        if sizes.intermediate_size % parts or self.num_routed & (self.num_routed - 1):
            raise AlignmentError(
                f"{sizes.intermediate_size} neurons in {self.num_routed} routed and {self.num_shared} shared parts",
                remedy="the parts must divide the neurons, and the routed ones be a power of two",
            )
        return sizes.intermediate_size // parts

    def padded_hidden(self, sizes: LlamaSizes) -> int:
        """The hidden size of the glm4_moe model."""
        return -(-sizes.hidden_size // self.hidden_multiple) * self.hidden_multiple


def glm4_moe_config(sizes: LlamaSizes, split: ExpertSplit, bos: int, eos: int) -> dict[str, Any]:
    """config.json of the float model, without a quantization block."""
    padded = split.padded_hidden(sizes)
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "vocab_size": sizes.vocab_size,
        "hidden_size": padded,
        # No layer is dense; readers want the field.
        "intermediate_size": sizes.intermediate_size,
        "moe_intermediate_size": split.expert_size(sizes),
        "num_hidden_layers": sizes.num_layers,
        "first_k_dense_replace": 0,
        "n_routed_experts": split.num_routed,
        "num_experts_per_tok": split.num_routed,
        "n_shared_experts": split.num_shared,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "partial_rotary_factor": 1.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_qk_norm": False,
        "num_nextn_predict_layers": 0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": float(split.num_routed),
        "rms_norm_eps": sizes.rms_norm_eps * sizes.hidden_size / padded,
        "rope_theta": sizes.rope_theta,
        "max_position_embeddings": sizes.max_tokens,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": None,
        "dtype": "bfloat16",
    }


def quantization_config() -> dict[str, Any]:
    """The block that says which weights are block FP8 (GLM-5.x and DeepSeek write the same)."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK_ROWS, FP8_BLOCK_COLUMNS],
    }


def _padded(weight: np.ndarray, rows: int | None = None, columns: int | None = None) -> np.ndarray:
    """`weight` with zeros behind it, up to `rows` rows and `columns` columns."""
    missing_rows = 0 if rows is None else rows - weight.shape[0]
    missing_columns = 0 if columns is None else columns - weight.shape[1]
    return np.pad(weight, ((0, missing_rows), (0, missing_columns)))


def glm4_moe_weights(
    sizes: LlamaSizes, weights: Mapping[str, np.ndarray], split: ExpertSplit
) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of the equal glm4_moe model, float32, in the order of its layers.

    `weights`: by transformers' Llama names, without lm_head. Equal in exact arithmetic (module docstring); a zero
    router and a zero correction bias are added.
    """
    padded = split.padded_hidden(sizes)
    norm_factor = np.float32(math.sqrt(sizes.hidden_size / padded))

    def norm(name: str) -> np.ndarray:
        weight = weights[name] * norm_factor
        return np.concatenate([weight, np.full(padded - len(weight), norm_factor)]).astype(np.float32)

    embedding = _padded(weights["model.embed_tokens.weight"], columns=padded)
    yield "model.embed_tokens.weight", embedding
    for layer in range(sizes.num_layers):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{name}.weight", norm(f"{prefix}.{name}.weight")
        for name in _READS_HIDDEN:
            stored = f"{prefix}.self_attn.{name}.weight"
            yield stored, _padded(weights[stored], columns=padded)
        stored = f"{prefix}.self_attn.o_proj.weight"
        yield stored, _padded(weights[stored], rows=padded)
        yield from _experts(f"{prefix}.mlp", sizes, weights, split)
    yield "model.norm.weight", norm("model.norm.weight")
    yield "lm_head.weight", embedding


def _experts(
    prefix: str, sizes: LlamaSizes, weights: Mapping[str, np.ndarray], split: ExpertSplit
) -> Iterator[tuple[str, np.ndarray]]:
    """Router and experts of one layer: the first neurons are the shared expert's."""
    padded, size = split.padded_hidden(sizes), split.expert_size(sizes)
    yield f"{prefix}.gate.weight", np.zeros((split.num_routed, padded), np.float32)
    yield f"{prefix}.gate.e_score_correction_bias", np.zeros(split.num_routed, np.float32)
    gate = _padded(weights[f"{prefix}.gate_proj.weight"], columns=padded)
    up = _padded(weights[f"{prefix}.up_proj.weight"], columns=padded)
    down = _padded(weights[f"{prefix}.down_proj.weight"], rows=padded)
    num_shared_neurons = split.num_shared * size
    places = [("shared_experts", slice(0, num_shared_neurons))] if num_shared_neurons else []
    for expert in range(split.num_routed):
        start = num_shared_neurons + expert * size
        places.append((f"experts.{expert}", slice(start, start + size)))
    for name, neurons in places:
        yield f"{prefix}.{name}.gate_proj.weight", gate[neurons]
        yield f"{prefix}.{name}.up_proj.weight", up[neurons]
        yield f"{prefix}.{name}.down_proj.weight", down[:, neurons]
