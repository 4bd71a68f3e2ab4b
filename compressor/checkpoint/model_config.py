"""config.json as it came: model type, text table, quantization block; and its rewritten form."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memopt.errors import ConfigError
from memopt.manifests.release_description import CONFIG_NAME as CONFIG_NAME
from memopt.manifests.strict_json import parse_json_object, read_capped

MAX_CONFIG_SIZE_BYTES = 16 * 2**20
QUANTIZATION_KEY = "quantization_config"
# compressed-tensors' older name for the same block, which engines still look for (vLLM transformers_utils/config.py).
OLD_QUANTIZATION_KEY = "compression_config"
QUANTIZATION_KEYS = (QUANTIZATION_KEY, OLD_QUANTIZATION_KEY)
TIED_KEY = "tie_word_embeddings"
TEXT_KEY = "text_config"


@dataclass(frozen=True)
class ModelConfig:
    """A parsed config.json.

    `raw`: every key as read, in order. `text`: the table with the text model's sizes, nested or the whole.
    `text_path`: () or ("text_config",). `quantization`: the quantization block, wherever it stands, or None.
    """

    raw: dict[str, Any]
    raw_bytes: bytes
    model_type: str
    text: dict[str, Any]
    text_path: tuple[str, ...]
    quantization: dict[str, Any] | None


def parse_config(raw_bytes: bytes, file: str = CONFIG_NAME) -> ModelConfig:
    """Parse config bytes; ConfigError naming the field that is missing or wrong."""
    raw = parse_json_object(raw_bytes, file, ConfigError)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError("model_type is missing", file=file)
    nested = raw.get(TEXT_KEY)
    text_path = (TEXT_KEY,) if isinstance(nested, dict) else ()
    text_table: dict[str, Any] = nested if isinstance(nested, dict) else raw
    blocks = (table.get(key) for key in QUANTIZATION_KEYS for table in (text_table, raw))
    quantization = next((block for block in blocks if block is not None and block != {}), None)
    if quantization is not None and not isinstance(quantization, dict):
        raise ConfigError(f"{QUANTIZATION_KEY} must be a table", file=file)
    return ModelConfig(raw, raw_bytes, model_type, text_table, text_path, quantization)


def read_config(folder: Path) -> ModelConfig:
    """Read and parse `folder`/config.json."""
    return parse_config(read_capped(folder / CONFIG_NAME, MAX_CONFIG_SIZE_BYTES, ConfigError))


def render_config(config: ModelConfig, quantization: dict[str, Any] | None) -> bytes:
    """config.json with its quantization block replaced (None: removed), where that family's engines look for it.

    Every other key keeps its place and value; a stale block anywhere else, or under the older name, is removed. Where
    the text model is nested, `tie_word_embeddings` is written if it is missing: transformers' default for kimi_k25 is
    true, other readers' is false.
    """
    raw = {key: value for key, value in config.raw.items() if key not in QUANTIZATION_KEYS}
    target = raw
    for key in config.text_path:
        target = {name: value for name, value in raw[key].items() if name not in QUANTIZATION_KEYS}
        raw[key] = target
        is_tied = bool(target.get(TIED_KEY))
        target.setdefault(TIED_KEY, is_tied)
        raw.setdefault(TIED_KEY, is_tied)
    if quantization is not None:
        target[QUANTIZATION_KEY] = quantization
    return (json.dumps(raw, indent=2, ensure_ascii=False) + "\n").encode()
