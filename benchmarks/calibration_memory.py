"""Peak memory of a calibration at several sizes: it must follow the layer and the budget, not layers or samples.

    python -m benchmarks.calibration_memory [gptq | weighted]

A checkpoint of random weights (hidden 512, 32 experts of 128) for each size, calibrated in a process of its own.
Memory is VmHWM of /proc/self/status, reset when everything is imported, small kernels are compiled, and free memory was
given back to the system; beside it the bound: one layer in memory and the budget. Each size runs twice: as glibc is,
which keeps freed blocks below 32 MiB for later, and with MALLOC_MMAP_THRESHOLD_, which makes it return them.
"""

from __future__ import annotations

import ctypes
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import memopt
from memopt.compressor.calibration_options import CalibrationOptions
from memopt.compressor.checkpoint.model_config import parse_config
from memopt.compressor.checkpoint.skeleton import skeleton_checkpoint
from memopt.compressor.recipe import Recipe

MIB = 2**20
SAMPLE_TOKENS = 256
BATCH_TOKENS = 512
BUDGET_BYTES = 40 * MIB
RESET_PEAK = "5"
# glibc reads it when a process starts: blocks from this size on go back to the system when they are freed.
THRESHOLD_VARIABLE = "MALLOC_MMAP_THRESHOLD_"
THRESHOLD_BYTES = MIB
CONFIG = Path(__file__).parent.parent / "examples" / "configs" / "glm-4.7-fp8.json"


@dataclass(frozen=True, slots=True)
class Size:
    """Layers of the model (the first is dense) and samples that run through it."""

    num_layers: int
    num_samples: int

    @property
    def rows_bytes(self) -> int:
        """Of one file of hidden states."""
        return self.num_samples * SAMPLE_TOKENS * SIZES_OF_MODEL["hidden_size"] * torch.float32.itemsize


SIZES_OF_MODEL: dict[str, int] = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "n_routed_experts": 32,
    "num_experts_per_tok": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_nextn_predict_layers": 0,
}
SIZES = (Size(2, 32), Size(4, 32), Size(2, 256))


def recipe_of(method: str) -> Recipe:
    """Routed experts by `method`."""
    return Recipe.model_validate(
        {
            "name": "memory",
            "description": f"Routed experts by {method}.",
            "families": ("glm4_moe",),
            "rules": ({"roles": ("routed_expert",), "format": {"type": "int4", "method": method}},),
            "default": "bf16",
        },
        strict=False,
    )


def write_checkpoint(folder: Path, num_layers: int) -> None:
    """Random weights under the published names."""
    folder.mkdir()
    config: dict[str, Any] = json.loads(CONFIG.read_text()) | SIZES_OF_MODEL | {"num_hidden_layers": num_layers}
    raw = json.dumps(config).encode()
    (folder / "config.json").write_bytes(raw)
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, stored in skeleton_checkpoint(parse_config(raw)).tensors.items():
        values = torch.randn(stored.shape, generator=generator)
        if stored.dtype == "F8_E4M3":
            tensors[name] = (values * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        elif "scale" in name:
            tensors[name] = values.abs() * 1e-4 + 1e-4
        else:
            plain = 1 + values * 0.02 if "norm" in name else values * 0.02
            tensors[name] = plain if stored.dtype == "F32" else plain.to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def peak_rss_bytes() -> int:
    """The most memory that was resident since the last reset."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].removesuffix("kB")) * 1024


def calibrate(folder: Path, method: str, size: Size, results: Connection) -> None:
    """Make the release of one size; sends seconds, growth of the peak, and its bound."""
    write_checkpoint(folder / "source", size.num_layers)
    write_checkpoint(folder / "small", SIZES[0].num_layers)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(512, (size.num_samples, SAMPLE_TOKENS), generator=generator, dtype=torch.int32)
    save_file({"ids": ids}, folder / "ids.safetensors")

    def options(num_samples: int) -> CalibrationOptions:
        return CalibrationOptions(
            folder / "ids.safetensors", num_samples, SAMPLE_TOKENS, BUDGET_BYTES, BATCH_TOKENS, 1, "cpu"
        )

    common: dict[str, Any] = {"recipe": recipe_of(method), "device": "cpu", "workers": 1}
    memopt.compress(folder / "small", folder / "warm", calibration=options(2), **common)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text(RESET_PEAK)
    idle_bytes = peak_rss_bytes()
    started = time.perf_counter()
    memopt.compress(folder / "source", folder / "out", calibration=options(size.num_samples), **common)
    seconds = time.perf_counter() - started
    growth_bytes = peak_rss_bytes() - idle_bytes
    bound_bytes = layer_bytes(folder / "source") + BUDGET_BYTES
    results.send(
        {"growth_mib": growth_bytes / MIB, "bound_mib": bound_bytes / MIB}
        | {"idle_mib": idle_bytes / MIB, "seconds": seconds}
    )


def layer_bytes(folder: Path) -> int:
    """Of the largest layer in memory: FP8 as stored, the rest in float32."""
    layers: dict[str, int] = {}
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - no mapping
            layer = name.partition(".layers.")[2].partition(".")[0]
            part = file.get_slice(name)
            item_bytes = 1 if part.get_dtype() == "F8_E4M3" else torch.float32.itemsize
            layers[layer] = layers.get(layer, 0) + math.prod(part.get_shape()) * item_bytes
    layers.pop("")
    return max(layers.values())


def measure(method: str, size: Size) -> dict[str, float]:
    """What `calibrate` finds in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=calibrate, args=(Path(folder), method, size, writer))
        process.start()
        found = {name: round(value, 1) for name, value in reader.recv().items()}
        process.join()
    return found


def main() -> None:
    for method in sys.argv[1:] or ["gptq", "weighted"]:
        for size in SIZES:
            for returns_blocks in (False, True):
                os.environ.pop(THRESHOLD_VARIABLE, None)
                if returns_blocks:
                    os.environ[THRESHOLD_VARIABLE] = str(THRESHOLD_BYTES)
                case = {"method": method, "returns_blocks": returns_blocks} | asdict(size)
                print(
                    json.dumps(case | {"rows_mib": size.rows_bytes / MIB} | measure(method, size)),
                    flush=True,
                )


if __name__ == "__main__":
    main()
