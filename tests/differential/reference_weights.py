"""What every weight of a checkpoint is: read by the safetensors library, expanded by the torch references alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from memopt.kernels.float8_reference import dequantize_float8_bf16
from memopt.kernels.int4_reference import dequantize_int4
from memopt.kernels.layout import CODES_PER_WORD

INDEX = "model.safetensors.index.json"


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every stored tensor, found through the index."""
    tensors: dict[str, Tensor] = {}
    weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    for file in sorted(set(weight_map.values())):
        with safe_open(folder / file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # not a dict
    assert set(tensors) == set(weight_map)
    return tensors


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def quantization_block(config: dict[str, Any]) -> dict[str, Any] | None:
    """`quantization_config`, at the top or below `text_config` as in Kimi K2.5."""
    return config.get("text_config", config).get("quantization_config")


def float8_block(config: dict[str, Any], weight: Tensor, scale: Tensor) -> tuple[int, int]:
    """Rows and columns that share an FP8 scale: the config's block, or a row each."""
    block = quantization_block(config) or {}
    if "weight_block_size" in block:
        return tuple(block["weight_block_size"])
    for group in block.get("config_groups", {}).values():
        if group["weights"].get("block_structure"):
            return tuple(group["weights"]["block_structure"])
    assert scale.shape == (weight.shape[0], 1)
    return 1, weight.shape[1]


def expand(name: str, tensors: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    """The logical weight `name`, "….weight" or another plain tensor: BF16 if it is stored quantized, else as stored."""
    base = name.removesuffix(".weight")
    packed = tensors.get(base + ".weight_packed")
    if packed is not None:
        scale = tensors[base + ".weight_scale"]
        rows, columns = packed.shape[0], packed.shape[1] * CODES_PER_WORD
        assert tensors[base + ".weight_shape"].tolist() == [rows, columns]
        return dequantize_int4(packed, scale, columns // scale.shape[1])
    weight = tensors[name]
    if weight.dtype != torch.float8_e4m3fn:
        return weight
    scale = tensors.get(base + ".weight_scale_inv", tensors.get(base + ".weight_scale"))
    assert scale is not None
    return dequantize_float8_bf16(weight, scale.to(torch.float32), float8_block(config, weight, scale))


def logical_names(tensors: dict[str, Tensor]) -> list[str]:
    """Names of weights and other plain tensors, without scales and shapes; packed ones as "….weight"."""
    names: list[str] = []
    for name in tensors:
        base, _, last = name.rpartition(".")
        if last == "weight_packed":
            names.append(base + ".weight")
        elif last not in {"weight_scale", "weight_scale_inv", "weight_shape"}:
            names.append(name)
    return names


def reference_weights(folder: Path) -> dict[str, Tensor]:
    """Every logical weight of a checkpoint or release, by the references alone."""
    tensors, config = read_tensors(folder), read_config(folder)
    return {name: expand(name, tensors, config) for name in logical_names(tensors)}


def int4_modules(tensors: dict[str, Tensor]) -> list[str]:
    return [name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")]


def negative_share(tensors: dict[str, Tensor]) -> float:
    """Share of INT4 scales below zero."""
    scales = torch.cat([tensors[module + ".weight_scale"].flatten() for module in int4_modules(tensors)])
    return float((scales < 0).float().mean())


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal dtype, shape and bytes: -0.0 is not 0.0."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
