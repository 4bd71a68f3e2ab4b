"""Small checkpoints of every family: true names, true ratios, random weights, written by the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from memopt.compressor.checkpoint.checkpoint import Checkpoint, StoredTensor
from memopt.compressor.checkpoint.model_config import parse_config
from memopt.compressor.checkpoint.skeleton import skeleton_checkpoint

EXAMPLES = Path(__file__).parent.parent / "examples"
CONFIGS = EXAMPLES / "configs"
TINY_GLM5 = EXAMPLES / "tiny-glm5-fp8"

_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
}
_MLA: dict[str, Any] = {
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
_TINY: dict[str, dict[str, Any]] = {
    "glm-5.2-fp8": _COMMON
    | _MLA
    | {"index_n_heads": 4, "index_head_dim": 32, "index_topk": 256, "head_dim": 48}
    | {"indexer_types": ["full", "full", "shared"]},
    "glm-5.1-fp8": _COMMON | _MLA | {"index_n_heads": 4, "index_head_dim": 32, "index_topk": 256, "head_dim": 48},
    "glm-4.7-fp8": _COMMON | {"head_dim": 32},
    "kimi-k2-instruct-fp8": _COMMON | _MLA,
    "kimi-k2.6-int4": _COMMON | _MLA,
    "deepseek-v3-fp8": _COMMON | _MLA | {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1},
}
# DeepSeek-V3's config differs from Kimi K2's in sizes and in its MTP layer.
_BASE = {"deepseek-v3-fp8": "kimi-k2-instruct-fp8"}
NAMES = tuple(_TINY)


def tiny_config(name: str, **changes: Any) -> dict[str, Any]:
    """A published config (one of NAMES) with small sizes; `changes` replace text fields, None removes one."""
    config: dict[str, Any] = json.loads((CONFIGS / f"{_BASE.get(name, name)}.json").read_text())
    text = config.get("text_config", config)
    text |= _TINY[name]
    for key, value in changes.items():
        if value is None:
            text.pop(key, None)
        else:
            text[key] = value
    return config


def random_tensor(tensor: StoredTensor, columns: int, generator: torch.Generator) -> torch.Tensor:
    """Plausible random contents for a stored tensor; `columns`: the logical width, for packed shapes."""
    shape = tensor.shape
    if tensor.name.endswith(".weight_shape"):
        return torch.tensor([0, columns], dtype=torch.int64)
    if tensor.dtype == "F8_E4M3":
        return (torch.randn(shape, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    if tensor.dtype == "I32":
        codes = torch.randint(1, 16, (*shape, 8), generator=generator, dtype=torch.int64)
        words = (codes << (4 * torch.arange(8))).sum(-1)
        return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    if "scale" in tensor.name:
        values = torch.rand(shape, generator=generator) * 3e-4 + 1e-4
        return values.to(torch.bfloat16 if tensor.dtype == "BF16" else torch.float32)
    values = torch.randn(shape, generator=generator) * 0.02
    if tensor.name.endswith("norm.weight"):
        values = 1 + values
    return values.to(torch.bfloat16 if tensor.dtype == "BF16" else torch.float32)


def make_tensors(checkpoint: Checkpoint, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random contents for every stored tensor of a skeleton."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, stored in checkpoint.tensors.items():
        tensors[name] = random_tensor(stored, 0, generator)
        if name.endswith(".weight_shape"):
            rows, words = checkpoint.tensors[name.replace("_shape", "_packed")].shape
            tensors[name] = torch.tensor([rows, words * 8], dtype=torch.int64)
    return tensors


def write_checkpoint(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], num_files: int = 2
) -> Path:
    """Write config, weights, index and a few metadata files as a publisher would."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text('{"temperature": 0.6 }\n')
    (folder / "tokenizer_config.json").write_text('{"model_max_length":4096,\n "x": "\\u00e9"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "modeling_custom.py").write_text("print('never run')\n")
    names = list(tensors)
    step = -(-len(names) // num_files)
    weight_map: dict[str, str] = {}
    for number in range(num_files):
        file = f"model-{number + 1:05d}-of-{num_files:06d}.safetensors"
        part = {name: tensors[name].contiguous() for name in names[number * step : (number + 1) * step]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def make_checkpoint(folder: Path, name: str, *, seed: int = 0, num_files: int = 2, **changes: Any) -> Path:
    """A tiny checkpoint of one of NAMES in `folder`; `changes` as in `tiny_config`."""
    config = tiny_config(name, **changes)
    skeleton = skeleton_checkpoint(parse_config(json.dumps(config).encode()))
    tensors = make_tensors(skeleton, seed)
    if config["model_type"] == "kimi_k25":
        generator = torch.Generator().manual_seed(seed)
        tensors["vision_tower.encoder.blocks.0.wqkv.weight"] = torch.randn(96, 32, generator=generator).bfloat16()
        tensors["mm_projector.proj.weight"] = torch.randn(64, 32, generator=generator).bfloat16()
    return write_checkpoint(folder, config, tensors, num_files)
