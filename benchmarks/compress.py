"""End-to-end speed of `memopt compress` on true-shape experts, and its ratio to plain torch, memcpy and SHA-256.

    python benchmarks/compress.py [--gib 1] [--runs 3] [--folder DIR] [--workers 1 2]

Everyone works on the same tensors, and takes turns: in each round each runs once, and the best round counts. Figures
are GB (10**9 bytes) of FP8 expert weights a second. Reads come from the page cache (the input was just written).
memopt plans, checks and flushes its output to --folder's file system; plain torch does neither.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from expert_checkpoint import write_expert_checkpoint
from safetensors import safe_open
from safetensors.torch import save_file

import memopt

GB = 1e9
BLOCK, GROUP = 128, 32
FILE_BYTES = 150 * 10**6
BASELINE_FILE = "baseline.safetensors"
# What docs/benchmarks.md holds memopt to.
TORCH_RATIO_BAR = 20.0
ABSMAX_BAR_BYTES_PER_SECOND = 0.7e9
ABSMAX_BAR_WORKERS = 2
SIGNED_BAR_BYTES_PER_SECOND = 0.06e9


@dataclass
class Contender:
    """One way to do the work; `run` does it once. `size_bytes`: FP8 input that one run stands for."""

    name: str
    run: Callable[[], object]
    size_bytes: int
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def take_turn(self) -> None:
        cpu, started = _cpu_seconds(), time.perf_counter()
        self.run()
        self.seconds.append(time.perf_counter() - started)
        self.cpu_seconds.append(_cpu_seconds() - cpu)

    @property
    def rate(self) -> float:
        """Bytes of input a second, in the best round."""
        return self.size_bytes / min(self.seconds)

    @property
    def cpu_rate(self) -> float:
        """Bytes of input for each second of processor time: says the same on a machine that others use, too."""
        return self.size_bytes / min(self.cpu_seconds)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def recipe_with(scale: str) -> memopt.Recipe:
    """The default recipe with another scale rule."""
    table = memopt.load_recipe("glm-5.2-int4").model_dump(mode="json")
    table["rules"][0]["format"]["scale"] = scale
    return memopt.Recipe.model_validate(table | {"tensor_parallel": 1})


def run_memopt(source: Path, out: Path, scale: str, workers: int) -> None:
    """One whole run, plan and final checks included."""
    shutil.rmtree(out, ignore_errors=True)
    options = memopt.PlanOptions(max_file_bytes=FILE_BYTES)
    memopt.compress(source, out, recipe=recipe_with(scale), options=options, workers=workers, device="cpu")


def expert_weights(source: Path) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, FP8 weight, block scale) of every routed expert: what memopt rounds to INT4."""
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (safe_open is not a dict)
                if ".experts." in name and name.endswith(".weight"):
                    yield name, opened.get_tensor(name), opened.get_tensor(name + "_scale_inv")


def run_torch(source: Path, out: Path) -> None:
    """Plain torch on all cores, as a careful user writes it: dequantize, absmax at group 32, pack, `save_file`."""
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, torch.Tensor] = {}
    for name, weight, scale_inv in expert_weights(source):
        rows, columns = weight.shape
        full = scale_inv.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        groups = (weight.to(torch.float32) * full).unflatten(1, (-1, GROUP))
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
    save_file(results, out / BASELINE_FILE, metadata={"format": "pt"})


def require_same_tensors(out: Path, baseline: Path) -> None:
    """SystemExit unless memopt's absmax run in `out` holds every tensor of the baseline, to the bit."""
    count = 0
    with safe_open(baseline / BASELINE_FILE, "pt") as theirs:
        wanted = set(theirs.keys())
        for file in sorted(out.glob("*.safetensors")):
            with safe_open(file, "pt") as ours:
                for name in wanted & set(ours.keys()):
                    if not torch.equal(ours.get_tensor(name), theirs.get_tensor(name)):
                        raise SystemExit(f"{name}: memopt and plain torch differ, so their times say nothing")
                    count += 1
    if count != len(wanted):
        raise SystemExit(f"memopt wrote {count} of plain torch's {len(wanted)} tensors")


def contenders(source: Path, work: Path, size_bytes: int, workers: list[int]) -> list[Contender]:
    """Everyone that takes part, on `source` with `size_bytes` of FP8 experts; there is an absmax release in `out`."""
    data, target = np.ones(2**28, np.uint8), np.empty(2**28, np.uint8)
    released = sorted((work / "out").glob("*.safetensors"))
    output = released[0].read_bytes()
    # One file stands for all: the input that became it.
    share = len(output) / sum(file.stat().st_size for file in released)
    found = [
        Contender("plain torch", lambda: run_torch(source, work / "baseline"), size_bytes),
        Contender("memcpy, one core", lambda: np.copyto(target, data), data.nbytes),
        Contender("SHA-256 of the output, one core", lambda: hashlib.sha256(output), round(share * size_bytes)),
    ]
    for scale in ("absmax", "mse", "mse-signed"):
        for count in workers:
            found.append(
                Contender(
                    f"memopt {scale}, {count} workers",
                    partial(run_memopt, source, work / "out", scale, count),
                    size_bytes,
                )
            )
    return found


def bars(found: dict[str, Contender], workers: list[int]) -> Iterator[tuple[str, float, float, str]]:
    """(what, figure, bar, unit) of everything that is wanted."""
    most = max(workers)
    torch_ratio = found[f"memopt absmax, {most} workers"].rate / found["plain torch"].rate
    yield f"absmax, {most} workers, to plain torch on all cores", torch_ratio, TORCH_RATIO_BAR, "x"
    if ABSMAX_BAR_WORKERS in workers:
        rate = found[f"memopt absmax, {ABSMAX_BAR_WORKERS} workers"].rate
        yield f"absmax, {ABSMAX_BAR_WORKERS} workers", rate / GB, ABSMAX_BAR_BYTES_PER_SECOND / GB, " GB/s"
    for count in workers:
        rate = found[f"memopt mse-signed, {count} workers"].rate / count
        yield f"mse-signed, {count} workers, a worker", rate / GB, SIGNED_BAR_BYTES_PER_SECOND / GB, " GB/s"


def main() -> None:
    parser = argparse.ArgumentParser(description="End-to-end speed of memopt compress, and its ratios.")
    parser.add_argument("--gib", type=float, default=1.0, help="GiB of FP8 experts")
    parser.add_argument("--runs", type=int, default=3, help="rounds, of which the best counts")
    parser.add_argument("--folder", type=Path, default=None, help="where to work (default: the temporary folder)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    with tempfile.TemporaryDirectory(prefix="memopt-bench-", dir=arguments.folder) as name:
        work, source = Path(name), Path(name) / "source"
        size_bytes = write_expert_checkpoint(source, int(arguments.gib * 2**30))
        os.sync()
        print(
            f"input {size_bytes / 2**30:.2f} GiB of FP8 experts, 6144x2048 and 2048x6144; {os.cpu_count()} cores;"
            f" {arguments.runs} rounds"
        )
        # Compiles, or loads what is compiled, and starts torch's threads; and proves that both do the same work.
        run_torch(source, work / "baseline")
        run_memopt(source, work / "out", "absmax", max(arguments.workers))
        require_same_tensors(work / "out", work / "baseline")
        everyone = contenders(source, work, size_bytes, arguments.workers)
        for _ in range(arguments.runs):
            for contender in everyone:
                contender.take_turn()
    found = {contender.name: contender for contender in everyone}
    base, copy, digest = everyone[:3]
    print(f"{'':<32} {'GB/s':>8} {'GB/CPU s':>9} {'x torch':>8} {'x memcpy':>9} {'x SHA-256':>10}")
    for one in everyone:
        ratios = f"{one.rate / base.rate:8.1f} {one.rate / copy.rate:9.3f} {one.rate / digest.rate:10.2f}"
        print(f"{one.name:<32} {one.rate / GB:8.3f} {one.cpu_rate / GB:9.3f} {ratios}")
    for what, figure, bar, unit in bars(found, arguments.workers):
        print(f"{'PASS' if figure >= bar else 'FAIL'} {what}: {figure:.3g}{unit} (wanted: {bar:g}{unit} or more)")


if __name__ == "__main__":
    main()
