"""Tiny checkpoints and releases as models of the runtime, read by the safetensors library."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from memopt.runtime.model.config_file import parse_model_config
from memopt.runtime.model.decoder import Decoder
from memopt.runtime.model.model_config import ModelConfig
from memopt.runtime.weights.load_model import LoadOptions, load_decoder


def model_config(folder: Path) -> ModelConfig:
    return parse_model_config(json.loads((folder / "config.json").read_text()))


def stored_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """In the order of files, as `Release.iter_tensors`."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # not a dict
                yield name, opened.get_tensor(name)


def load(folder: Path, weights: Path | None = None, **options: Any) -> Decoder:
    """The model in float32 unless told otherwise; `weights`: where its tensors lie, if not in `folder`."""
    chosen = LoadOptions(**{"compute": "float32", **options})
    return load_decoder(model_config(folder), stored_tensors(weights or folder), chosen)
