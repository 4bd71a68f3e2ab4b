"""Loads checkpoints with transformers and gives the weights back under the checkpoint's own names."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CompressedTensorsConfig,
    PreTrainedModel,
)

_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")


def load_model(folder: Path, *, dequantize: bool) -> PreTrainedModel:
    """The model as transformers makes it in BF16; every parameter of the text model must be found.

    `dequantize`: ask compressed-tensors to expand quantized weights on load.
    """
    table = json.loads((folder / "config.json").read_text())
    arguments: dict[str, Any] = {"dtype": torch.bfloat16, "output_loading_info": True}
    if dequantize:
        arguments["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    loader = AutoModelForCausalLM
    if table["model_type"] == "kimi_k25":
        loader = AutoModelForImageTextToText
    elif table["model_type"] == "kimi_k2":
        # transformers 5.24 has no kimi_k2; the architecture, which config.json names, is DeepSeek-V3's.
        arguments["config"] = AutoConfig.for_model(**(table | {"model_type": "deepseek_v3"}))
    with warnings.catch_warnings():
        # "The quantization_config from the model will be used", which is the point.
        warnings.filterwarnings("ignore", "You passed `quantization_config`", UserWarning)
        model, report = loader.from_pretrained(folder, **arguments)
    missing = {name for name in report["missing_keys"] if "mm_projector" not in name and "vision_tower" not in name}
    assert not missing
    assert not report["mismatched_keys"]
    return model.eval()


def loaded_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters of the text model by checkpoint name; the fused 3-D experts are taken apart again."""
    weights: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if "vision_tower" in name or "mm_projector" in name:
            continue
        stored = re.sub(r"^model\.language_model\.", "language_model.model.", name)
        if model.config.model_type == "kimi_k25" and name.startswith("lm_head"):
            stored = "language_model." + name
        fused = _EXPERTS.fullmatch(stored)
        if fused is None:
            weights[stored] = tensor
            continue
        for number, expert in enumerate(tensor):
            module = f"{fused[1]}.{number}"
            if fused[2] == "down_proj":
                weights[f"{module}.down_proj.weight"] = expert
            else:
                weights[f"{module}.gate_proj.weight"], weights[f"{module}.up_proj.weight"] = expert.chunk(2)
    return weights
