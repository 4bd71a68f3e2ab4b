"""Writes the glm4_moe model as a checkpoint: BF16 throughout, or block FP8 with the rest BF16 as GLM publishes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.smollm2.as_glm4_moe import quantization_config
from benchmarks.smollm2.block_fp8 import quantize_block_fp8

FILE_BYTES = 64 * 2**20
_BIAS = "e_score_correction_bias"


def is_fp8(name: str) -> bool:
    """Whether tensor `name` is stored as block FP8: every projection of attention and experts, nothing else."""
    return name.endswith("_proj.weight")


def stored_tensors(name: str, values: np.ndarray, *, use_fp8: bool) -> dict[str, Tensor]:
    """What the checkpoint holds for one logical tensor: BF16, F32 for the correction bias, or FP8 codes and scales.

    FP8 is made from the BF16 value, as a published checkpoint's was.
    """
    tensor = torch.from_numpy(values)
    if name.endswith(_BIAS):
        return {name: tensor}
    rounded = tensor.to(torch.bfloat16)
    if not (use_fp8 and is_fp8(name)):
        return {name: rounded}
    codes, scale = quantize_block_fp8(rounded, name)
    return {name: codes, f"{name}_scale_inv": scale}


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    weights: Iterable[tuple[str, np.ndarray]],
    small_files: Mapping[str, bytes],
    *,
    use_fp8: bool,
) -> int:
    """Write config.json, `small_files`, weights in files of about FILE_BYTES and the index; returns the weights' bytes.

    A tensor and its scale are in one file. `folder` must not exist.
    """
    folder.mkdir(parents=True)
    table = dict(config)
    files: list[dict[str, Tensor]] = [{}]
    not_converted: list[str] = []
    size = 0
    for name, values in weights:
        stored = stored_tensors(name, values, use_fp8=use_fp8)
        if len(stored) == 1 and values.ndim == 2 and name.endswith(".weight"):
            not_converted.append(name.removesuffix(".weight"))
        files[-1] |= stored
        size += sum(tensor.nbytes for tensor in stored.values())
        if sum(tensor.nbytes for tensor in files[-1].values()) >= FILE_BYTES:
            files.append({})
    if not files[-1]:
        files.pop()
    if use_fp8:
        table["quantization_config"] = quantization_config() | {"modules_to_not_convert": sorted(not_converted)}
    (folder / "config.json").write_text(json.dumps(table, indent=1) + "\n")
    for name, raw in small_files.items():
        (folder / name).write_bytes(raw)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(files, start=1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        weight_map |= dict.fromkeys(tensors, file)
        # safetensors refuses two names of one memory (embedding and head).
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    return size
