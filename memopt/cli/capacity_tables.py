"""A capacity plan as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.console import Console
from rich.table import Table

from memopt.cli.output import size_text
from memopt.compressor.capacity.assumptions import assumptions
from memopt.compressor.capacity.capacity_plan import CapacityPlan, StageCapacity
from memopt.compressor.capacity.gpus import Gpu
from memopt.compressor.capacity.kv_bytes import ELEMENT_BITS
from memopt.compressor.capacity.kv_formula import DenseCache
from memopt.compressor.capacity.rank_weights import RankWeights
from memopt.compressor.capacity.speed import SpeedBound

_TERA = 1e12
_MILLISECONDS_PER_SECOND = 1e3
_UNKNOWN = "-"

Cell = Callable[[StageCapacity], str]


def print_weights_line(console: Console, weights: RankWeights, layout: str) -> None:
    """One line: what a rank holds, beside the plain division of the checkpoint."""
    with_mtp = weights.size_bytes(is_mtp_on=True)
    without = weights.size_bytes(is_mtp_on=False)
    share = size_text(weights.checkpoint_size_bytes(is_mtp_on=True) // weights.num_ranks)
    mtp = f", {size_text(without)} without MTP layers" if without != with_mtp else ""
    console.print(
        f"a rank      {size_text(with_mtp)} of weights{mtp}; checkpoint / {weights.num_ranks}: {share} ({layout})"
    )


def _rate(value: float | None, unit: str) -> str:
    return f"no {unit} known" if value is None else f"{value / _TERA:,.2f} {unit}"


def _gpu_text(gpu: Gpu, num_ranks: int) -> str:
    rates = ", ".join(
        (
            _rate(gpu.bandwidth_bytes_per_second, "TB/s"),
            _rate(gpu.bf16_flops, "TFLOP/s BF16"),
            _rate(gpu.fp8_flops, "TFLOP/s FP8"),
        )
    )
    return f"{num_ranks} x {gpu.name}, each {size_text(gpu.memory_bytes)}, {rates}"


def _kv_text(stage: StageCapacity) -> str:
    token = stage.token
    parts = f"{token.num_layers} x {token.key_bytes:,}"
    if token.num_indexer_layers:
        parts += f" + {token.num_indexer_layers} x {token.indexer_bytes}"
    return f"{token.size_bytes:,} B ({parts})"


def _optional_size(size_bytes: int | None) -> str:
    return _UNKNOWN if size_bytes is None else size_text(max(size_bytes, 0))


def _count(number: int | None) -> str:
    return _UNKNOWN if number is None else f"{number:,}"


def _memory_rows(plan: CapacityPlan) -> Iterator[tuple[str, Cell]]:
    num_ranks, is_mtp_on = plan.layout.num_ranks, plan.request.is_mtp_on
    yield "weights", lambda stage: ", ".join(stage.stage.weight_formats)
    yield "recipe", lambda stage: stage.stage.recipe
    yield "checkpoint", lambda stage: size_text(stage.weights.checkpoint_size_bytes(is_mtp_on=True))
    yield (
        f"checkpoint / {num_ranks}",
        lambda stage: size_text(stage.weights.checkpoint_size_bytes(is_mtp_on=True) // num_ranks),
    )
    if plan.shape.num_mtp_layers:
        yield "a rank, with MTP layers", lambda stage: size_text(stage.weights.size_bytes(is_mtp_on=True))
        yield "a rank, without", lambda stage: size_text(stage.weights.size_bytes(is_mtp_on=False))
    else:
        yield "a rank", lambda stage: size_text(stage.weights.size_bytes(is_mtp_on=False))
    if plan.request.has_absorbed_copies and any(stage.weights.absorbed_bytes for stage in plan.stages):
        yield (
            "W_UK, W_UV copies, BF16",
            lambda stage: size_text(stage.weights.absorbed_size_bytes(is_mtp_on=is_mtp_on)),
        )
    yield "weights loaded", lambda stage: size_text(stage.weights_bytes)
    yield "KV format", lambda stage: str(stage.token.format)
    yield "KV cache a token", _kv_text
    if plan.request.gpu is not None and plan.request.kv_pool_bytes is None:
        yield (
            "weights and KV cache",
            lambda stage: _optional_size(None if stage.memory is None else stage.memory.static_bytes),
        )
    if any(stage.pool_bytes is not None for stage in plan.stages):
        yield "KV pool", lambda stage: _optional_size(stage.pool_bytes)
        yield "tokens that fit", lambda stage: _count(stage.tokens)
    if plan.request.context is not None:
        yield (
            f"a request of {plan.request.context:,}",
            lambda stage: size_text(stage.token.size_bytes * (plan.request.context or 0)),
        )
        if any(stage.requests is not None for stage in plan.stages):
            yield "such requests that fit", lambda stage: _count(stage.requests)


def _milliseconds(seconds: float | None) -> str:
    return _UNKNOWN if seconds is None else f"{seconds * _MILLISECONDS_PER_SECOND:,.2f} ms"


def _of_speed(cell: Callable[[SpeedBound], str]) -> Cell:
    return lambda stage: _UNKNOWN if stage.speed is None else cell(stage.speed)


def _speed_rows() -> Iterator[tuple[str, Cell]]:
    yield "requests x tokens", _of_speed(lambda speed: f"{speed.load.requests:,} x {speed.load.length:,}")
    yield "reads: routed experts", _of_speed(lambda speed: size_text(speed.step.expert_bytes))
    yield "reads: other weights", _of_speed(lambda speed: size_text(speed.step.other_weight_bytes))
    yield "reads: KV cache", _of_speed(lambda speed: size_text(speed.step.kv_bytes))
    yield "computes", _of_speed(lambda speed: f"{speed.step.flops / _TERA:,.2f} TFLOP")
    yield "memory, at least", _of_speed(lambda speed: _milliseconds(speed.step.memory_seconds))
    yield "compute, at least", _of_speed(lambda speed: _milliseconds(speed.step.compute_seconds))
    yield "binds", _of_speed(lambda speed: speed.step.binds or "unknown: a rate of the GPU is missing")
    yield (
        "tokens a second, at most",
        _of_speed(lambda speed: _UNKNOWN if speed.tokens_per_second is None else f"{speed.tokens_per_second:,.0f}"),
    )


def _print_stages(console: Console, plan: CapacityPlan, title: str, rows: Iterator[tuple[str, Cell]]) -> None:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for stage in plan.stages:
        table.add_column(stage.stage.name)
    for name, cell in rows:
        table.add_row(name, *(cell(stage) for stage in plan.stages))
    console.print(table)


def _from(length: int | None) -> str:
    return "at no length up to the model's maximum" if length is None else f"from {length:,} tokens"


def _print_crossover(console: Console, plan: CapacityPlan, stage: StageCapacity) -> None:
    if stage.speed is None or stage.speed.crossover is None:
        return
    found, number, form = stage.speed.crossover, stage.speed.load.requests, stage.token.format
    together = "one request" if number == 1 else f"{number:,} requests together"
    console.print(f"\nWhere {form} KV starts to pay, for {together}")
    if found.longest is not None and found.longest_bf16 is not None:
        console.print(
            f"  room: requests of at most {found.longest_bf16:,} tokens fit with BF16, of {found.longest:,} with {form}"
        )
    if plan.request.gpu is not None and plan.request.gpu.bandwidth_bytes_per_second is not None:
        until = "" if found.saves_until_length is None else f" up to {found.saves_until_length:,}"
        console.print(f"  speed: it shortens a step by {found.share:.0%} or more {_from(found.saves_length)}{until}")
    console.print(f"  a step reads more BF16 cache than weights {_from(found.kv_over_weights_length)}")
    if plan.request.overhead_seconds is not None:
        overhead = plan.request.overhead_seconds * _MILLISECONDS_PER_SECOND
        console.print(
            f"  with {overhead:g} ms a step for expanding it, it saves time {_from(found.breaks_even_length)}"
        )


def print_capacity(console: Console, plan: CapacityPlan) -> None:
    """Weights, KV cache and requests by stage; bounds on speed; every assumption."""
    where = plan.layout.folder if plan.request.gpu is None else _gpu_text(plan.request.gpu, plan.layout.num_ranks)
    _print_stages(console, plan, f"\nCapacity of one GPU: {where}", _memory_rows(plan))
    if any(stage.speed is not None for stage in plan.stages):
        title = "\nBounds by a model, one GPU's work: decode of one step, prefill of one request"
        _print_stages(console, plan, title, _speed_rows())
        for stage in plan.stages:
            _print_crossover(console, plan, stage)
    console.print("\nAssumptions")
    for sentence in assumptions(plan):
        console.print(f"  - {sentence}")


def print_dense_cache(console: Console, cache: DenseCache) -> None:
    """The plain formula with its factors, and the size by format."""
    console.print(
        f"{cache.layers:,} layers x 2 x {cache.tokens:,} tokens x {cache.kv_heads:,} KV heads x {cache.head_dim:,} "
        f"elements x {cache.requests:,} requests"
    )
    for form, bits in ELEMENT_BITS.items():
        console.print(f"  {form:<9} {bits:>2} bits  {size_text(cache.size_bytes(form))}")
