"""tokenizer.json and tokenizer_config.json from the vocabulary, merges and chat template of the GGUF file.

llama.cpp's pre-tokenizer "smollm" (llama-vocab.cpp) is digits one by one, then GPT-2's pattern on bytes: what
SmolLM2's own tokenizer.json spells as Digits(individual_digits) and ByteLevel.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from memopt.errors import UnsupportedError

# llama.cpp's llama_token_type.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_PREFIX = "tokenizer.ggml"


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer of a GGUF file with `tokenizer.ggml.pre` "smollm"; UnsupportedError for another."""
    kind = (metadata.get(f"{_PREFIX}.model"), metadata.get(f"{_PREFIX}.pre"))
    if kind != ("gpt2", "smollm"):
        raise UnsupportedError(f"tokenizer {kind}; ('gpt2', 'smollm') is read")
    texts: list[str] = metadata[f"{_PREFIX}.tokens"]
    types: list[int] = metadata[f"{_PREFIX}.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata[f"{_PREFIX}.merges"]]
    if len(set(texts)) != len(texts) or any(len(merge) != 2 for merge in merges) or len(types) != len(texts):
        raise UnsupportedError("a vocabulary with repeated tokens, or merges that are no pairs")
    vocabulary = {text: number for number, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text, kind in zip(texts, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens(special)
    if tokenizer.get_vocab_size() != len(texts):
        raise UnsupportedError(f"{tokenizer.get_vocab_size()} tokens of {len(texts)}")
    return tokenizer


def tokenizer_config(metadata: Mapping[str, Any]) -> bytes:
    """tokenizer_config.json: class, begin and end tokens, chat template."""
    texts = metadata[f"{_PREFIX}.tokens"]
    table = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": texts[metadata[f"{_PREFIX}.bos_token_id"]],
        "eos_token": texts[metadata[f"{_PREFIX}.eos_token_id"]],
        "unk_token": texts[metadata[f"{_PREFIX}.unknown_token_id"]],
        "model_max_length": metadata["llama.context_length"],
        "chat_template": metadata["tokenizer.chat_template"],
    }
    return (json.dumps(table, indent=1, ensure_ascii=False) + "\n").encode()
