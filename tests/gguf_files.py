"""Writes GGUF files for tests, from the format's description: independent of the reader."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

F32, Q4_1, Q8_0 = 0, 3, 8
ALIGNMENT = 32


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """Type number and bytes of a metadata value."""
    if isinstance(item, bool):
        return struct.pack("<IB", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, str):
        return struct.pack("<I", 8) + text(item)
    strings = bool(item) and isinstance(item[0], str)
    parts = [text(part) if strings else struct.pack("<i", part) for part in item]
    return struct.pack("<IIQ", 9, 8 if strings else 5, len(item)) + b"".join(parts)


def gguf_bytes(
    metadata: dict[str, Any], tensors: dict[str, tuple[int, tuple[int, ...], bytes]], version: int = 3
) -> bytes:
    """A file with `tensors`: name -> (type number, shape with the slowest dimension first, bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, item in metadata.items():
        head += text(key) + value(item)
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        data += bytes(-len(data) % ALIGNMENT)
        dimensions = tuple(reversed(shape))
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *dimensions, kind, len(data))
        data += raw
    return head + bytes(-len(head) % ALIGNMENT) + data


def q4_1_bytes(weight: np.ndarray) -> bytes:
    """`weight` [R, C] rounded to Q4_1 blocks: scale = range / 15, minimum, 32 nibbles."""
    blocks = weight.reshape(-1, 32)
    low = blocks.min(1, keepdims=True).astype("<f2")
    scale = ((blocks.max(1, keepdims=True) - low.astype("f4")) / 15).astype("<f2")
    steps = np.where(scale == 0, 1, scale).astype("f4")
    codes = np.clip(np.rint((blocks - low.astype("f4")) / steps), 0, 15).astype(np.uint8)
    packed = codes[:, :16] | codes[:, 16:] << 4
    return np.concatenate([scale.view(np.uint8), low.view(np.uint8), packed], axis=1).tobytes()


def permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py, word for word in numpy."""
    return (
        weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


TINY = {
    "vocab_size": 300,
    "embedding_length": 96,
    "feed_forward_length": 384,
    "block_count": 2,
    "attention.head_count": 3,
    "attention.head_count_kv": 1,
    "context_length": 128,
    "rope.dimension_count": 32,
}


def tiny_metadata() -> dict[str, Any]:
    """Metadata of a Llama with 96 channels, 3 heads on 1, 384 neurons, and a byte-level vocabulary of 300."""
    from tokenizers import pre_tokenizers

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["t h", "th e", "i n", "Ġ the", "e r", "a n", "o n", "Ġ a"]
    tokens = special + alphabet + [merge.replace(" ", "") for merge in merges]
    tokens += [f"unused-{number}" for number in range(TINY["vocab_size"] - len(tokens))]
    return {
        "general.architecture": "llama",
        **{f"llama.{name}": size for name, size in TINY.items()},
        "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(special) + [1] * (len(tokens) - len(special)),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{{ messages }}",
    }


def tiny_llama_bytes(seed: int = 0) -> bytes:
    """A whole GGUF file of a random Llama of TINY's sizes, projections in Q4_1."""
    generator = np.random.default_rng(seed)
    hidden, neurons, heads, kv = 96, 384, 3, 1
    head = hidden // heads

    def q4_1(rows: int, columns: int) -> tuple[int, tuple[int, ...], bytes]:
        weight = generator.standard_normal((rows, columns), dtype=np.float32) / np.sqrt(columns)
        return Q4_1, (rows, columns), q4_1_bytes(weight.astype(np.float32))

    def norm() -> tuple[int, tuple[int, ...], bytes]:
        return F32, (hidden,), (1 + 0.1 * generator.standard_normal(hidden)).astype("<f4").tobytes()

    # Small, so that the head (the same weights) leaves many tokens possible.
    embedding = (0.2 * generator.standard_normal((TINY["vocab_size"], hidden))).astype("<f4")
    tensors = {"token_embd.weight": (F32, embedding.shape, embedding.tobytes()), "output_norm.weight": norm()}
    for layer in range(TINY["block_count"]):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": norm(),
            f"blk.{layer}.attn_q.weight": q4_1(heads * head, hidden),
            f"blk.{layer}.attn_k.weight": q4_1(kv * head, hidden),
            f"blk.{layer}.attn_v.weight": q4_1(kv * head, hidden),
            f"blk.{layer}.attn_output.weight": q4_1(hidden, heads * head),
            f"blk.{layer}.ffn_norm.weight": norm(),
            f"blk.{layer}.ffn_gate.weight": q4_1(neurons, hidden),
            f"blk.{layer}.ffn_up.weight": q4_1(neurons, hidden),
            f"blk.{layer}.ffn_down.weight": q4_1(hidden, neurons),
        }
    return gguf_bytes(tiny_metadata(), tensors)
