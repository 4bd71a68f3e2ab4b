"""INT4 products on one core against torch's on dequantized weights: `python benchmarks/int4_gemm_cpu.py`.

Milliseconds of processor time (other programs do not count), best of the runs. Copies of a weight take turns, so that
each comes from memory. About 40 seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import linear

from memopt.kernels.gemm.int4_gemm import int4_gemm
from memopt.kernels.gemm.int4_gemm_reference import weight_values
from memopt.kernels.gemm.int4_weight import Int4Weight
from memopt.kernels.gemm.moe_gemm import moe_gemm
from memopt.kernels.gemm.torch_int4_weight import torch_int4_weight
from memopt.kernels.layout import CODES_PER_WORD

# More than the caches hold, in weights: a quarter as bytes of INT4, and four times that as float32.
COLD_WEIGHTS = 1 << 26
RUNS = 7
GROUP_SIZE = 32
SHAPES = {"4096 x 4096": (4096, 4096), "GLM-5.2 gate+up, TP8": (512, 6144), "GLM-5.2 down, TP8": (6144, 256)}
TOKENS = (1, 4, 16)
# Experts of one GLM-5.2 layer on one of eight ranks, cut to what fits a small machine.
NUM_EXPERTS, WIDTH, HIDDEN_SIZE, TOP_K = 32, 6144, 256, 8
GIGA = 1e9


def random_weight(*shape: int) -> Int4Weight:
    """Any words under scales near 1; `shape` is [.., N, K]."""
    words = torch.randint(-(1 << 31), 1 << 31, (*shape[:-1], shape[-1] // CODES_PER_WORD), dtype=torch.int32)
    scales = torch.rand(*shape[:-1], shape[-1] // GROUP_SIZE) + 0.5
    return Int4Weight(words, scales.to(torch.bfloat16), GROUP_SIZE)


def best_seconds(run: Callable[[], object]) -> float:
    """The shortest of several runs after one that does not count."""
    times = []
    for _ in range(RUNS + 1):
        start = time.thread_time()
        run()
        times.append(time.thread_time() - start)
    return min(times[1:])


def product_rows(name: str, num_rows: int, num_columns: int) -> None:
    """A line of the table for every number of tokens."""
    count = max(2, COLD_WEIGHTS // (num_rows * num_columns))
    weights = [random_weight(num_rows, num_columns) for _ in range(count)]
    packed = [torch_int4_weight(weight) for weight in weights]
    f32 = [weight_values(weight) for weight in weights]
    bf16 = [values.to(torch.bfloat16) for values in f32]
    for num_tokens in TOKENS:
        x = torch.randn(num_tokens, num_columns).to(torch.bfloat16)
        wide = x.to(torch.float32)
        seconds = {
            "f32": best_seconds(lambda x=wide: [linear(x, weight) for weight in f32]),
            "bf16": best_seconds(lambda x=x: [linear(x, weight) for weight in bf16]),
            "int4": best_seconds(lambda x=x: [int4_gemm(x, weight) for weight in weights]),
            "packed": best_seconds(lambda x=x: [int4_gemm(x, weight) for weight in packed]),
        }
        milliseconds = "".join(f"{1e3 * value / count:9.3f}" for value in seconds.values())
        rate = weights[0].size_bytes * count / seconds["packed"] / GIGA
        print(f"{name:22}{num_tokens:4}{milliseconds}{rate:9.1f}", flush=True)


def experts_rows() -> None:
    """The same for a layer of experts: torch's side is a linear a touched expert, as transformers runs it."""
    gate_up = random_weight(NUM_EXPERTS, 2 * HIDDEN_SIZE, WIDTH)
    down = random_weight(NUM_EXPERTS, WIDTH, HIDDEN_SIZE)
    pairs = [(weight_values(gate_up.expert(e)), weight_values(down.expert(e))) for e in range(NUM_EXPERTS)]
    packed = torch_int4_weight(gate_up), torch_int4_weight(down)
    dense = {
        dtype: [(first.to(dtype), second.to(dtype)) for first, second in pairs]
        for dtype in (torch.float32, torch.bfloat16)
    }
    for num_tokens in TOKENS:
        x = torch.randn(num_tokens, WIDTH).to(torch.bfloat16)
        weights, ids = torch.topk(torch.softmax(torch.rand(num_tokens, NUM_EXPERTS), dim=1), TOP_K)
        runs = [partial(experts_in_torch, x.to(dtype), values, ids, weights) for dtype, values in dense.items()]
        runs += [partial(moe_gemm, x, *pair, ids, weights) for pair in ((gate_up, down), packed)]
        seconds = [best_seconds(run) for run in runs]
        touched = int(torch.unique(ids).numel()) / NUM_EXPERTS
        rate = touched * (gate_up.size_bytes + down.size_bytes) / seconds[-1] / GIGA
        milliseconds = "".join(f"{1e3 * value:9.3f}" for value in seconds)
        print(f"{'experts of GLM-5.2':22}{num_tokens:4}{milliseconds}{rate:9.1f}", flush=True)


def experts_in_torch(
    x: torch.Tensor, pairs: list[tuple[torch.Tensor, torch.Tensor]], ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The layer with dequantized experts, as transformers' eager experts multiply them."""
    out = torch.zeros_like(x)
    for expert in torch.unique(ids).tolist():
        token, choice = (ids == expert).nonzero(as_tuple=True)
        gate, up = linear(x[token], pairs[expert][0]).chunk(2, dim=-1)
        product = linear(torch.nn.functional.silu(gate) * up, pairs[expert][1])
        out.index_add_(0, token, product * weights[token, choice, None].to(x.dtype))
    return out


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    source = torch.empty(64 << 20, dtype=torch.uint8).random_()
    target = torch.empty_like(source)
    copied = source.numel() / best_seconds(lambda: target.copy_(source)) / GIGA
    print(f"memcpy {copied:.1f} GB/s copied; milliseconds; GB/s of packed weights with torch's packed kernel")
    print(f"{'':22}{'x':>4}{'f32':>9}{'bf16':>9}{'int4':>9}{'packed':>9}{'GB/s':>9}")
    for name, (num_rows, num_columns) in SHAPES.items():
        product_rows(name, num_rows, num_columns)
    experts_rows()


if __name__ == "__main__":
    main()
