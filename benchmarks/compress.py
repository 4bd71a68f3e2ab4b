"""End-to-end speed of `memopt compress` on true-shape experts, and its ratio to plain torch, memcpy and SHA-256.

    python benchmarks/compress.py [--gib 1] [--folder DIR] [--workers 1 2]

One run, one machine, one after the other; every figure is GB of FP8 input a second. Reads come from the page cache
(the input was just written); writes go to --folder's file system and are flushed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from expert_checkpoint import write_expert_checkpoint
from safetensors import safe_open
from safetensors.torch import save_file

import memopt

BASELINE_TENSORS = 12
GB = 1e9


def recipe_with(scale: str) -> memopt.Recipe:
    """The default recipe with another scale rule."""
    table = memopt.load_recipe("glm-5.2-int4").model_dump(mode="json")
    table["rules"][0]["format"]["scale"] = scale
    return memopt.Recipe.model_validate(table | {"tensor_parallel": 1})


def compress_seconds(source: Path, out: Path, scale: str, workers: int) -> float:
    """Seconds for one whole run, plan and final checks included."""
    shutil.rmtree(out, ignore_errors=True)
    options = memopt.PlanOptions(max_file_bytes=150 * 10**6)
    started = time.perf_counter()
    memopt.compress(source, out, recipe=recipe_with(scale), options=options, workers=workers, device="cpu")
    return time.perf_counter() - started


def torch_seconds(source: Path, out: Path) -> tuple[float, int]:
    """Plain torch, as a careful user writes it: dequantize, absmax at group 32, pack, `save_file`. (seconds, bytes)."""
    torch.set_num_threads(os.cpu_count() or 1)
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, torch.Tensor] = {}
    done = 0
    started = time.perf_counter()
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (safe_open is not a dict)
                if ".experts." not in name or not name.endswith(".weight") or done >= BASELINE_TENSORS * 6144 * 2048:
                    continue
                weight = opened.get_tensor(name)
                scale_inv = opened.get_tensor(name + "_scale_inv")
                rows, columns = weight.shape
                full = scale_inv.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
                groups = (weight.to(torch.float32) * full).unflatten(1, (-1, 32))
                scale = (groups.abs().amax(-1) / 7.5).to(torch.bfloat16)
                codes = torch.clamp(torch.round(groups / scale.float().unsqueeze(-1)), -8, 7).to(torch.int32) + 8
                words = codes.reshape(rows, -1, 8)
                packed = torch.zeros(rows, columns // 8, dtype=torch.int32)
                for nibble in range(8):
                    packed |= words[..., nibble] << (4 * nibble)
                base = name.removesuffix(".weight")
                results[f"{base}.weight_packed"] = packed
                results[f"{base}.weight_scale"] = scale
                results[f"{base}.weight_shape"] = torch.tensor([rows, columns])
                done += weight.numel()
    save_file(results, out / "baseline.safetensors", metadata={"format": "pt"})
    return time.perf_counter() - started, done


def memcpy_rate() -> float:
    """Bytes copied a second by one core."""
    source = np.ones(2**28, np.uint8)
    target = np.empty_like(source)
    best = float("inf")
    for _ in range(4):
        started = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - started)
    return source.nbytes / best


def sha256_rate(out: Path) -> float:
    """Bytes of output hashed a second by one core."""
    data = next(iter(sorted(out.glob("*.safetensors")))).read_bytes()
    started = time.perf_counter()
    hashlib.sha256(data).digest()
    return len(data) / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=1.0, help="GiB of FP8 experts")
    parser.add_argument("--folder", type=Path, default=None, help="where to work (default: the temporary folder)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="memopt-bench-", dir=arguments.folder) as name:
        work = Path(name)
        input_bytes = write_expert_checkpoint(work / "source", int(arguments.gib * 2**30))
        os.sync()
        print(f"input {input_bytes / 2**30:.2f} GiB of FP8 experts, 6144x2048 and 2048x6144; {os.cpu_count()} cores")
        compress_seconds(work / "source", work / "out", "absmax", 1)
        torch_time, torch_bytes = torch_seconds(work / "source", work / "baseline")
        torch_rate = torch_bytes / torch_time
        copy_rate = memcpy_rate()
        hash_rate = sha256_rate(work / "out")
        # SHA-256 of the output alone, told in GB of input: 0.5625 bytes come out for each that goes in.
        hash_input_rate = hash_rate / 0.5625
        print(f"plain torch        {torch_rate / GB:6.3f} GB/s ({torch_bytes / 2**30:.2f} GiB, all cores)")
        print(f"memcpy             {copy_rate / GB:6.2f} GB/s (one core)")
        print(
            f"SHA-256 of output  {hash_input_rate / GB:6.2f} GB/s of input"
            f" ({hash_rate / GB:.2f} GB/s of output, one core)"
        )
        for scale in ("absmax", "mse", "mse-signed"):
            for workers in arguments.workers:
                best = min(compress_seconds(work / "source", work / "out", scale, workers) for _ in range(3))
                rate = input_bytes / best
                print(
                    f"memopt {scale:<11} {rate / GB:6.3f} GB/s with {workers} workers: {rate / torch_rate:5.1f}x torch,"
                    f" {rate / copy_rate:.3f} of memcpy, {rate / hash_input_rate:.2f} of SHA-256 of the output"
                )


if __name__ == "__main__":
    main()
