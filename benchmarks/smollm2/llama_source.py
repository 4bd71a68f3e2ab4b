"""SmolLM2 out of its GGUF file: sizes and float32 weights under the names and in the order of transformers' Llama.

llama.cpp's convert_hf_to_gguf.py (LlamaModel.permute) stores the rows of each query and key head with rotary pairs
side by side; Hugging Face's Llama and glm4_moe keep the first elements of all pairs before the second ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.smollm2.gguf import GgufFile, GgufHeader
from memopt.errors import MissingTensorError, UnknownTensorError, UnsupportedError

ARCHITECTURE = "llama"
_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class LlamaSizes:
    """A Llama with tied embeddings, no biases and whole-head rotary embedding."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    max_tokens: int
    rope_theta: float
    rms_norm_eps: float

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, slots=True)
class LlamaSource:
    """`weights`: float32 arrays by transformers' names, without lm_head (tied). `header`: for the tokenizer."""

    sizes: LlamaSizes
    weights: Mapping[str, np.ndarray]
    header: GgufHeader


def parse_sizes(header: GgufHeader) -> LlamaSizes:
    """Sizes from the metadata; UnsupportedError for another architecture or partial rotary embedding."""
    table = header.metadata
    if table.get("general.architecture") != ARCHITECTURE:
        raise UnsupportedError(f"architecture {table.get('general.architecture')!r}; {ARCHITECTURE} is read")

    def of(key: str) -> int:
        value = table.get(f"{ARCHITECTURE}.{key}")
        if not isinstance(value, int):
            raise UnsupportedError(f"{ARCHITECTURE}.{key} is {value!r}")
        return value

    def figure(key: str) -> float:
        value = table.get(f"{ARCHITECTURE}.{key}")
        if type(value) not in (int, float):
            raise UnsupportedError(f"{ARCHITECTURE}.{key} is {value!r}")
        return float(value)

    sizes = LlamaSizes(
        vocab_size=of("vocab_size"),
        hidden_size=of("embedding_length"),
        intermediate_size=of("feed_forward_length"),
        num_layers=of("block_count"),
        num_heads=of("attention.head_count"),
        num_kv_heads=of("attention.head_count_kv"),
        max_tokens=of("context_length"),
        rope_theta=figure("rope.freq_base"),
        # Stored as float32: 9.999999747378752e-06 was 1e-5.
        rms_norm_eps=float(f"{figure('attention.layer_norm_rms_epsilon'):.6g}"),
    )
    if of("rope.dimension_count") != sizes.head_dim:
        raise UnsupportedError("rotary embedding of a part of the head")
    return sizes


def unpermuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q_proj or k_proj [num_heads * head_dim, hidden] in transformers' order: pairs (i, i + head_dim / 2).

    The inverse of LlamaModel.permute in llama.cpp's convert_hf_to_gguf.py.
    """
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def stored_names(num_layers: int) -> dict[str, str]:
    """GGUF name -> transformers' name of every tensor of such a model."""
    layers = {
        f"blk.{layer}.{stored}.weight": f"model.layers.{layer}.{name}.weight"
        for layer in range(num_layers)
        for stored, name in _LAYER.items()
    }
    return _TOP | layers


def read_llama(path: Path) -> LlamaSource:
    """The model in the GGUF file `path`; errors name a tensor that is missing or one too many."""
    with GgufFile(path) as opened:
        sizes = parse_sizes(opened.header)
        names = stored_names(sizes.num_layers)
        for name in sorted(set(names) - set(opened.header.tensors)):
            raise MissingTensorError("is not there", tensor=name, file=path.name)
        for name in sorted(set(opened.header.tensors) - set(names)):
            raise UnknownTensorError("is no tensor of a Llama with tied embeddings", tensor=name, file=path.name)
        weights = {name: opened.read(stored) for stored, name in names.items()}
        heads = {"q_proj": sizes.num_heads, "k_proj": sizes.num_kv_heads}
        for name in weights:
            projection = name.split(".")[-2]
            if projection in heads:
                weights[name] = unpermuted(weights[name], heads[projection])
        return LlamaSource(sizes, weights, opened.header)
