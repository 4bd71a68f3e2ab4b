"""Speed and worth of the INT4 scale search on one core: `python benchmarks/scale_search.py [--experts N] [--runs N]`.

Every speed is FP8 input in GB (10**9 bytes of weights) a second of processor time on one core, best of the runs, beside
a memcpy timed in the same process. Every error is the sum of squares over all weights, relative to absmax rounding of
the same weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open

from memopt.kernels import cpu
from memopt.kernels.int4_spec import SCALE_GRID, ErrorNorm, Int4Spec, ScaleSearch
from memopt.kernels.layout import E4M3_MAX, FP8_BLOCK_COLUMNS, FP8_BLOCK_ROWS

Weights = tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]
BLOCK = (FP8_BLOCK_ROWS, FP8_BLOCK_COLUMNS)
CHECKPOINT = Path(__file__).parents[1] / "examples" / "tiny-glm5-fp8"
KINDS: tuple[tuple[ScaleSearch, ErrorNorm], ...] = (
    ("absmax", "2"), ("mse", "2"), ("mse-signed", "2"), ("mse", "2.4"), ("mse-signed", "2.4"),
)  # fmt: skip
# gate_proj and up_proj, then down_proj of GLM-5.2's routed experts.
SHAPES = ((2048, 6144), (6144, 2048))
MAX_RATIO = 12.0
MIN_GAIN = 0.20


def gaussian_expert(rows: int, columns: int, seed: int) -> Weights:
    """Gaussian weights stored as block FP8."""
    values = np.random.default_rng(seed).normal(scale=0.02, size=(rows, columns)).astype(np.float32)
    blocks = torch.from_numpy(values).view(rows // BLOCK[0], BLOCK[0], columns // BLOCK[1], BLOCK[1])
    scale = blocks.abs().amax(dim=(1, 3)) / E4M3_MAX
    codes = (blocks / scale[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).numpy(), scale.numpy()


def checkpoint_experts(folder: Path) -> Iterator[Weights]:
    """The routed experts of an FP8 checkpoint."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                if ".mlp.experts." in name and name.endswith(".weight"):
                    weight = tensors.get_tensor(name).view(torch.uint8).numpy()
                    yield weight, tensors.get_tensor(f"{name}_scale_inv").numpy()


def best_seconds(run: Callable[[], object], runs: int) -> float:
    """The shortest of several runs, in seconds of processor time: other programs on the machine do not count."""
    times = []
    for _ in range(runs):
        start = time.thread_time()
        run()
        times.append(time.thread_time() - start)
    return min(times)


def squared_error(weights: list[Weights], spec: Int4Spec) -> float:
    """Sum of squared errors over all weights."""
    return float(sum(cpu.quantize_int4(codes, scale, BLOCK, spec).sq_error.sum() for codes, scale in weights))


def print_speeds(experts: list[Weights], group: int | None, runs: int) -> float:
    """Prints a table and returns how many times as long as absmax the default search takes."""
    size = sum(codes.nbytes for codes, _ in experts)
    base, default = 0.0, 0.0
    for search, norm in KINDS:
        spec = Int4Spec(group, search, norm)
        seconds = best_seconds(lambda spec=spec: squared_error(experts, spec), runs)  # type: ignore[misc]
        base = base or seconds
        default = seconds / base if (search, norm) == ("mse-signed", "2") else default
        print(
            f"  {search:<10} p={norm:<3} {size / seconds / 1e9:6.3f} GB/s of FP8  {seconds / base:5.1f} x absmax's time"
        )
    return default


def print_gains(name: str, weights: list[Weights], group: int | None) -> float:
    """Prints a table and returns the gain of the default search."""
    base = squared_error(weights, Int4Spec(group, "absmax"))
    default = 0.0
    for search, norm in KINDS[1:]:
        gain = 1 - squared_error(weights, Int4Spec(group, search, norm)) / base
        default = gain if (search, norm) == ("mse-signed", "2") else default
        print(f"  {name}: {search:<10} p={norm:<3} squared error {100 * gain:5.2f} % below absmax")
    return default


def print_bars(ratio: float, gain: float, trained: float) -> None:
    """What is wanted of the default search, and whether it holds."""
    verdict = "PASS" if ratio <= MAX_RATIO else "FAIL"
    print(f"{verdict} default search: {ratio:.1f} x absmax's time (wanted: {MAX_RATIO:.0f} x or less)")
    for name, found in (("Gaussian groups", gain), ("the trained checkpoint", trained)):
        verdict = "PASS" if found >= MIN_GAIN else "FAIL"
        print(f"{verdict} default search on {name}: {100 * found:.1f} % (wanted: {100 * MIN_GAIN:.0f} % or more)")


def main() -> None:
    """Runs everything and prints it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--experts", type=int, default=2, help="experts to time (12.6 MB each)")
    parser.add_argument("--runs", type=int, default=5, help="runs, of which the best counts")
    options = parser.parse_args()
    experts = [gaussian_expert(*SHAPES[seed % 2], seed) for seed in range(options.experts)]
    start = time.perf_counter()
    cpu.quantize_int4(np.zeros((1, 32), np.uint8), np.ones((1, 1), np.float32), BLOCK, Int4Spec())
    print(f"first call (compiling, or loading the compiled code): {time.perf_counter() - start:.2f} s")
    target = np.empty_like(experts[0][0])
    seconds = best_seconds(lambda: np.copyto(target, experts[0][0]), options.runs)
    print(f"memcpy: {target.nbytes / seconds / 1e9:.1f} GB/s")
    print(f"grid: {len(SCALE_GRID)} factors from {SCALE_GRID[0]} to {SCALE_GRID[-1]}")
    real = list(checkpoint_experts(CHECKPOINT))
    for group in (32, 128, None):
        print(f"group {group or 'channel'}, one core, {options.experts} experts:")
        ratio = print_speeds(experts, group, options.runs)
        gain = print_gains("Gaussian", experts[:1], group)
        trained = print_gains(f"{CHECKPOINT.name} ({len(real)} expert tensors)", real, group)
        if group == Int4Spec().group_size:
            print_bars(ratio, gain, trained)
    codes, scale = experts[0]
    seconds = best_seconds(lambda: cpu.dequantize_float8_bf16(codes, scale, BLOCK), options.runs)
    print(f"dequantize FP8 to BF16: {codes.nbytes / seconds / 1e9:.2f} GB/s of FP8")
    rows = cpu.quantize_int4(codes, scale, BLOCK, Int4Spec(32, "absmax"))
    seconds = best_seconds(lambda: cpu.dequantize_int4(rows.packed, rows.scale_bits, 32), options.runs)
    print(f"dequantize INT4 to BF16: {codes.size / seconds / 1e9:.2f} billion weights/s")


if __name__ == "__main__":
    main()
