"""Checkpoints for benchmarks: experts of GLM-5.2's shape (6144 x 2048), as large as wanted; or very many tensors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from memopt.compressor.checkpoint.model_config import parse_config
from memopt.compressor.checkpoint.skeleton import skeleton_checkpoint
from memopt.manifests.safetensors_header import TensorHeader, render_header

HIDDEN, INTERMEDIATE = 6144, 2048
EXPERT_BYTES = 3 * HIDDEN * INTERMEDIATE
FILE_BYTES = 2**30
FILE_TENSORS = 2_000
TABLE_BYTES = 2**24
GLM_CONFIG = Path(__file__).parents[1] / "examples" / "configs" / "glm-5.2-fp8.json"
# GLM-5.2 with all its layers and experts, and sizes so small that the tensors' number is what costs.
TINY_SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "index_n_heads": 4,
    "index_head_dim": 32,
}


def bench_config(num_experts: int, num_layers: int = 1) -> dict[str, object]:
    """A glm_moe_dsa config with true expert shapes and little else."""
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "vocab_size": 512,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "moe_intermediate_size": INTERMEDIATE,
        "num_hidden_layers": num_layers,
        "first_k_dense_replace": 0,
        "n_routed_experts": num_experts,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "q_lora_rank": 128,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "index_n_heads": 1,
        "index_head_dim": 128,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }


def _random_fp8(generator: np.random.Generator) -> np.ndarray:
    """Bytes of Gaussian weights as a block-FP8 quantizer leaves them: largest 448, no NaN."""
    import torch

    values = torch.from_numpy(generator.standard_normal(TABLE_BYTES, dtype=np.float32)) * (448 / 4.5)
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def write_expert_checkpoint(folder: Path, size_bytes: int, num_layers: int = 1) -> int:
    """Write experts of about `size_bytes` into `folder`; returns the FP8 bytes of routed experts."""
    num_experts = max(1, round(size_bytes / EXPERT_BYTES / num_layers))
    return _write_checkpoint(folder, bench_config(num_experts, num_layers))


def write_many_tensors(folder: Path) -> int:
    """Write GLM-5.2's 118,629 tensors, each of at most a few KiB, into `folder`; returns the FP8 bytes of experts."""
    return _write_checkpoint(folder, json.loads(GLM_CONFIG.read_text()) | TINY_SIZES)


def _write_checkpoint(folder: Path, config: dict[str, object]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    raw = json.dumps(config).encode()
    (folder / "config.json").write_bytes(raw)
    generator = np.random.default_rng(0)
    table = _random_fp8(generator)
    files: list[list[TensorHeader]] = [[]]
    for stored in skeleton_checkpoint(parse_config(raw)).tensors.values():
        start = files[-1][-1].end if files[-1] else 0
        if files[-1] and (start + stored.size_bytes > FILE_BYTES or len(files[-1]) == FILE_TENSORS):
            files.append([])
            start = 0
        files[-1].append(TensorHeader(stored.name, stored.dtype, stored.shape, start, start + stored.size_bytes))
    weight_map: dict[str, str] = {}
    expert_bytes = 0
    for number, tensors in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        with open(folder / name, "wb") as stream:
            stream.write(render_header(tensors, {"format": "pt"}))
            for tensor in tensors:
                weight_map[tensor.name] = name
                stream.write(_contents(tensor, table, generator))
                if tensor.dtype == "F8_E4M3" and ".experts." in tensor.name:
                    expert_bytes += tensor.size_bytes
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return expert_bytes


def _contents(tensor: TensorHeader, table: np.ndarray, generator: np.random.Generator) -> bytes:
    if tensor.dtype == "F8_E4M3":
        shift = int(generator.integers(0, TABLE_BYTES))
        count = tensor.size_bytes
        repeats = -(-(shift + count) // TABLE_BYTES)
        return (table if repeats == 1 else np.tile(table, repeats))[shift : shift + count].tobytes()
    if tensor.dtype == "F32":
        return (generator.random(tensor.size_bytes // 4, dtype=np.float32) * 1e-4 + 1e-4).tobytes()
    return bytes(tensor.size_bytes)
