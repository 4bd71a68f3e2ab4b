"""Peak memory of a calibration at several sizes: it must follow the layer and the budget, not layers or samples.

    python -m benchmarks.calibration_memory

A checkpoint of random weights (hidden 512, 16 experts of 512) for each size, calibrated with method gptq in a process
of its own. Memory is VmHWM of /proc/self/status, reset when everything is imported and small kernels are compiled.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import memopt
from memopt.compressor.calibration_options import CalibrationOptions
from memopt.compressor.checkpoint.model_config import parse_config
from memopt.compressor.checkpoint.skeleton import skeleton_checkpoint
from memopt.compressor.recipe import Recipe

MIB = 2**20
SAMPLE_TOKENS = 256
BATCH_TOKENS = 512
BUDGET_BYTES = 96 * MIB
RESET_PEAK = "5"
CONFIG = Path(__file__).parent.parent / "examples" / "configs" / "glm-4.7-fp8.json"
RECIPE = Recipe.model_validate(
    {
        "name": "memory",
        "description": "Routed experts by GPTQ.",
        "families": ("glm4_moe",),
        "rules": ({"roles": ("routed_expert",), "format": {"type": "int4", "method": "gptq"}},),
        "default": "bf16",
    },
    strict=False,
)


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
    "moe_intermediate_size": 512,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_nextn_predict_layers": 0,
}
SIZES = (Size(2, 32), Size(4, 32), Size(2, 64), Size(2, 128))


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


def calibrate(folder: Path, size: Size, results: Connection) -> None:
    """Make the release of one size; sends seconds and peak memory."""
    write_checkpoint(folder / "source", size.num_layers)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(512, (size.num_samples, SAMPLE_TOKENS), generator=generator, dtype=torch.int32)
    save_file({"ids": ids}, folder / "ids.safetensors")
    warm = CalibrationOptions(folder / "ids.safetensors", 2, SAMPLE_TOKENS, BUDGET_BYTES, BATCH_TOKENS, 1, "cpu")
    asked = CalibrationOptions(
        folder / "ids.safetensors", size.num_samples, SAMPLE_TOKENS, BUDGET_BYTES, BATCH_TOKENS, device="cpu"
    )
    common: dict[str, Any] = {"recipe": RECIPE, "device": "cpu", "workers": 1}
    memopt.compress(folder / "source", folder / "warm", calibration=warm, **common)
    before = peak_rss_bytes()
    Path("/proc/self/clear_refs").write_text(RESET_PEAK)
    idle = peak_rss_bytes()
    started = time.perf_counter()
    memopt.compress(folder / "source", folder / "out", calibration=asked, **common)
    seconds = time.perf_counter() - started
    results.send(
        {"idle_mib": idle / MIB, "warm_peak_mib": before / MIB, "peak_mib": peak_rss_bytes() / MIB}
        | {"seconds": seconds}
    )


def main() -> None:
    context = multiprocessing.get_context("spawn")
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=calibrate, args=(Path(folder), size, writer))
            process.start()
            found = {name: round(value, 1) for name, value in reader.recv().items()}
            process.join()
            print(json.dumps(asdict(size) | {"rows_mib": size.rows_bytes / MIB} | found), flush=True)


if __name__ == "__main__":
    main()
