"""A checkpoint of 1 MB that gives a release of several files: quick to compress, long enough to be interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tiny_checkpoints import make_checkpoint

import memopt
from memopt.compressor.pipeline import RunResult
from memopt.manifests.safetensors_header import read_header

MAX_FILE_BYTES = 200_000
OPTIONS = memopt.PlanOptions(max_file_bytes=MAX_FILE_BYTES, tensor_parallel=1)
# With files for two ranks, written in the same pass.
RANK_OPTIONS = memopt.PlanOptions(max_file_bytes=MAX_FILE_BYTES, tensor_parallel=2)
# The same as OPTIONS for the command line.
FLAGS = ("--max-file-size", str(MAX_FILE_BYTES), "--tp", "1")
# A routed expert of the source's first MoE layer: quantized; and where its scale is.
EXPERT = "model.layers.1.mlp.experts.0.gate_proj.weight"
EXPERT_SCALE = "model.layers.1.mlp.experts.0.gate_proj.weight_scale_inv"


def make_small_source(folder: Path) -> Path:
    """A GLM-5.1 checkpoint of two layers and an MTP layer, in `folder`."""
    return make_checkpoint(
        folder,
        "glm-5.1-fp8",
        hidden_size=128,
        vocab_size=128,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        n_routed_experts=4,
        num_attention_heads=4,
        num_key_value_heads=4,
    )


def compress(source: Path, out: Path, *, workers: int = 1, **options: object) -> RunResult:
    """memopt.compress with OPTIONS."""
    return memopt.compress(source, out, **{"options": OPTIONS, "workers": workers, "device": "cpu", **options})  # type: ignore[arg-type]


def file_of(source: Path, tensor: str) -> tuple[Path, int, int]:
    """The file of `source` that holds `tensor`, and the tensor's first byte and size in it."""
    for path in sorted(source.glob("*.safetensors")):
        header = read_header(path)
        for stored in header.tensors:
            if stored.name == tensor:
                return path, header.data_start + stored.start, stored.size_bytes
    raise KeyError(tensor)


def edit_tensor(source: Path, tensor: str, change: Callable[[bytearray], None]) -> Path:
    """Let `change` alter the stored bytes of `tensor`; the header stays. Returns the file."""
    path, start, size = file_of(source, tensor)
    raw = bytearray(path.read_bytes())
    part = raw[start : start + size]
    change(part)
    raw[start : start + size] = part
    path.write_bytes(raw)
    return path
