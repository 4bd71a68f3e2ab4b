"""GPU cases of calibration: the Hessian of GLM-5.2's routed experts, and the GPTQ solve of their gate or up weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.case import GpuCase, Prepared
from memopt.kernels.calibration.gptq import gptq_solve
from memopt.kernels.calibration.gptq_block_cpu import gptq_block_cpu
from memopt.kernels.calibration.gptq_block_reference import gptq_block_reference
from memopt.kernels.calibration.gptq_block_triton import gptq_block_triton
from memopt.kernels.calibration.gptq_options import GptqResult
from memopt.kernels.calibration.gptq_reference import gptq_reference
from memopt.kernels.calibration.hessian import accumulate_hessian
from memopt.kernels.calibration.hessian_reference import accumulate_hessian_reference
from memopt.kernels.layout import GPTQ_BLOCK_COLUMNS, INT4_HALF_SPAN

HIDDEN_SIZE = 6144
EXPERT_ROWS = 2048
GROUP_SIZE = 32
# Tensor cores cut what is added below a sum's last bit; 4096 tokens are 256 such additions.
HESSIAN_TOLERANCE = 5e-5
# float32 against float64: a code at a tie may fall either way, and those behind follow; the loss stays.
LOSS_TOLERANCE = 1e-3
F32_BYTES = 4


def prepare_hessian(num_experts: int, size: int, tokens_an_expert: int, generator: torch.Generator) -> Prepared:
    """Ragged experts around `tokens_an_expert` tokens each; `flops` and bytes are those of the upper triangle."""
    device = generator.device
    spread = torch.randint(tokens_an_expert // 2 + 1, (num_experts,), generator=generator, device=device)
    counts = spread + tokens_an_expert * 3 // 4
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64, device=device), counts.cumsum(0)])
    num_tokens = int(offsets[-1])
    tokens = torch.randn(num_tokens, size, generator=generator, device=device).to(torch.bfloat16)
    hessian = torch.zeros(num_experts, size, size, device=device)
    experts = [tokens[first:end] for first, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]
    product = torch.empty(size, size, dtype=torch.bfloat16, device=device)

    def run() -> None:
        accumulate_hessian(hessian, tokens, offsets)

    def check() -> float:
        hessian.zero_()
        run()
        first = hessian.clone()
        hessian.zero_()
        run()
        if not torch.equal(first, hessian) or not torch.equal(first, first.mT):
            return float("inf")
        expected = torch.zeros_like(first)
        accumulate_hessian_reference(expected, tokens, offsets)
        norm = expected.diagonal(dim1=1, dim2=2).sqrt()
        return float(((first - expected).abs() / (norm[:, :, None] * norm[:, None, :])).max())

    def bf16_matmul() -> None:
        for expert in experts:
            torch.matmul(expert.T, expert, out=product)

    return Prepared(
        run=run,
        outputs=(),
        check=check,
        tolerance=HESSIAN_TOLERANCE,
        bytes_moved=num_experts * size * size * F32_BYTES * 3 // 2 + tokens.nbytes,
        flops=num_tokens * size * (size + 1),
        peers={"torch bf16 matmul, whole square": bf16_matmul},
    )


def prepare_block(num_experts: int, num_rows: int, generator: torch.Generator) -> Prepared:
    """One block of columns of every expert; the result is the reference's to the bit."""
    device = generator.device
    normal = partial(torch.randn, generator=generator, device=device)
    columns = GPTQ_BLOCK_COLUMNS
    weights = normal(num_experts, columns, num_rows) * 0.02
    factor = normal(num_experts, columns, columns).triu() * 0.1
    factor.diagonal(dim1=1, dim2=2).abs_().add_(0.5)
    scales = normal(num_experts, columns // GROUP_SIZE, num_rows).abs() * 0.002 + 0.004
    groups = torch.arange(columns, dtype=torch.int32, device=device) // GROUP_SIZE
    groups = groups.expand(num_experts, columns).contiguous()
    codes = torch.empty(weights.shape, dtype=torch.int8, device=device)
    errors = torch.empty_like(weights)
    solve_block = gptq_block_triton if weights.is_cuda else gptq_block_cpu

    def check() -> float:
        expected_codes, expected_errors = torch.empty_like(codes), torch.empty_like(errors)
        gptq_block_reference(weights, factor, scales, groups, expected_codes, expected_errors)
        is_equal = torch.equal(codes, expected_codes) and torch.equal(errors, expected_errors)
        return 0.0 if is_equal else float("inf")

    return Prepared(
        run=lambda: solve_block(weights, factor, scales, groups, codes, errors),
        outputs=(codes, errors),
        check=check,
        tolerance=0.0,
        bytes_moved=sum(tensor.nbytes for tensor in (weights, factor, scales, groups, codes, errors)),
    )


def prepare_solve(num_experts: int, num_rows: int, size: int, generator: torch.Generator) -> Prepared:
    """A whole solve, factorization included, against the float64 textbook of the last expert by its loss."""
    device = generator.device
    normal = partial(torch.randn, generator=generator, device=device)
    weight = normal(num_experts, num_rows, size) * 0.02
    hessian = torch.zeros(num_experts, size, size, device=device)
    for expert in range(num_experts):
        accumulate_hessian(hessian[expert], (normal(2 * size, size) * normal(size).exp()).to(torch.bfloat16))
    scale = (weight.unflatten(2, (-1, GROUP_SIZE)).abs().amax(dim=3) / INT4_HALF_SPAN).to(torch.bfloat16)
    results: list[GptqResult] = []

    def run() -> None:
        results[:] = [gptq_solve(weight, hessian, scale)]

    def loss(codes: Tensor) -> float:
        each = scale[-1].to(torch.float64).repeat_interleave(GROUP_SIZE, dim=1)
        difference = weight[-1].to(torch.float64) - codes * each
        return float(((difference @ hessian[-1].to(torch.float64)) * difference).sum())

    def check() -> float:
        expected = loss(gptq_reference(weight[-1], hessian[-1], scale[-1]))
        return max(loss(results[0].codes[-1]) / expected - 1.0, 0.0)

    return Prepared(
        run=run,
        outputs=(),
        check=check,
        tolerance=LOSS_TOLERANCE,
        bytes_moved=weight.nbytes + hessian.nbytes + scale.nbytes + weight.numel(),
        # The corrections; Cholesky, inverse and the comparison with plain rounding come on top.
        flops=num_experts * num_rows * size * size,
    )


def _sized(prepare: Callable[..., Prepared], *sizes: int) -> Callable[[torch.Generator], Prepared]:
    return lambda generator: prepare(*sizes, generator)


def cases() -> Iterator[GpuCase]:
    """The Hessian goal is the project's. The GPTQ goals are ours: half of the issue rate, and 40 ms an expert."""
    yield GpuCase("hessian/glm-5.2-gate_proj", _sized(prepare_hessian, 8, HIDDEN_SIZE, 4096), 0.60, "bf16_flops")
    yield GpuCase("gptq_block/glm-5.2-gate_proj", _sized(prepare_block, 32, EXPERT_ROWS), 334.0, "microseconds")
    yield GpuCase(
        "gptq_solve/glm-5.2-gate_proj", _sized(prepare_solve, 2, EXPERT_ROWS, HIDDEN_SIZE), 80_000.0, "microseconds"
    )
