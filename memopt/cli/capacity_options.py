"""The options of `memopt plan` that ask what fits on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from memopt.cli.output import parse_size
from memopt.errors import UsageError

if TYPE_CHECKING:
    from memopt.compressor.capacity.gpus import Gpu
    from memopt.compressor.capacity.request import CapacityRequest

Function = TypeVar("Function", bound=Callable[..., Any])
_FORMATS = click.Choice(["bf16", "fp8_e4m3", "fp8_ds_mla", "int8", "int4"])
_MICROSECONDS_PER_SECOND = 1e6
_RESERVES = {
    "activations": "activations of a prefill chunk (default: 1.5 MiB a token, 12 GiB for 60 to 160 GiB GPUs)",
    "graphs": "CUDA graphs (default: 2 MiB a request, 1 GiB for the same)",
    "communication": "communication buffers (default 128 MiB a rank)",
    "kv_scratch": "FP8 pages expanded to BF16 (default: 5 times the longest request's keys for fp8_ds_mla, else 0)",
    "runtime": "the CUDA context and the engine's own (default 512 MiB)",
}


def _size(_context: click.Context, _parameter: click.Parameter, value: str | None) -> int | None:
    return None if value is None else parse_size(value)


def _size_option(flag: str, help_text: str, name: str | None = None) -> Callable[[Function], Function]:
    names = (flag,) if name is None else (flag, name)
    return click.option(*names, metavar="SIZE", callback=_size, default=None, help=help_text)


def capacity_options(function: Function) -> Function:
    """--gpu and all that says for what a plan must have room; they arrive as keyword arguments, None if not given."""
    decorators: list[Callable[[Any], Any]] = [
        click.option(
            "--gpu",
            metavar="NAME",
            default=None,
            help="Plan for GPUs of this kind, as h200: --tp or --ep of them (default: the recipe's degree).",
        ),
        _size_option("--gpu-memory", "Memory of a GPU, as 141GiB, instead of --gpu or in place of its figure."),
        _size_option("--gpu-bandwidth", "Memory bandwidth of a GPU a second, as 4.8TB."),
        click.option("--gpu-flops", type=float, default=None, help="Dense BF16 FLOP/s of a GPU, as 989e12."),
        click.option("--gpu-fp8-flops", type=float, default=None, help="Dense FP8 FLOP/s of a GPU."),
        _size_option("--kv-pool", "KV memory of a GPU, in place of what its memory leaves.", "kv_pool_bytes"),
        click.option(
            "--stage",
            type=click.Choice(["decode", "prefill", "both"]),
            default=None,
            help="Which stage to plan (default: decode for INT4 weights, else prefill).",
        ),
        click.option(
            "--kv-format",
            type=_FORMATS,
            default=None,
            help="KV cache of decode (default: fp8_ds_mla with a DSA indexer, else fp8_e4m3).",
        ),
        click.option("--prefill-kv-format", type=_FORMATS, default=None, help="KV cache of prefill (default: bf16)."),
        click.option(
            "--prefill-recipe",
            metavar="NAME",
            default=None,
            help="Weights of prefill, as copy or dequantize (default: the source's as they are, for an INT4 plan).",
        ),
        click.option(
            "--context", type=int, metavar="TOKENS", default=None, help="Length of a request, prompt and answer."
        ),
        click.option("--requests", type=int, default=None, help="Requests together (default: as many as fit)."),
        click.option(
            "--memory-fraction",
            type=float,
            default=None,
            help="Share of a GPU for weights and KV cache, as SGLang's mem_fraction_static (default 0.85).",
        ),
        *(
            _size_option(f"--reserve-{name.replace('_', '-')}", f"Reserve for {text}.", f"reserve_{name}")
            for name, text in _RESERVES.items()
        ),
        click.option("--mtp/--no-mtp", "is_mtp_on", default=None, help="Load the MTP layers (default: no)."),
        click.option(
            "--absorbed-copies/--no-absorbed-copies",
            "has_absorbed_copies",
            default=None,
            help="Count BF16 copies of W_UK and W_UV (default: yes).",
        ),
        click.option(
            "--indexer-cache",
            type=click.Choice(["all", "own"]),
            default=None,
            help="Charge the DSA indexer's cache on all layers (SGLang, default) or on those that own one (vLLM).",
        ),
        _size_option("--weights-per-gpu", "Weights of a GPU, in place of the planned ones.", "weights_per_gpu_bytes"),
        click.option(
            "--kv-saving",
            "share",
            type=float,
            default=None,
            metavar="SHARE",
            help="Share of a decode step that a smaller cache must save to pay (default 0.05).",
        ),
        click.option(
            "--kv-overhead-us", type=float, default=None, help="Microseconds a step that expanding such a cache costs."
        ),
    ]
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


def _require_used(given: dict[str, Any]) -> None:
    """UsageError for an option that would change nothing beside those that were given."""
    has_gpu = "gpu" in given or "gpu_memory" in given
    divides = [name for name in given if name == "memory_fraction" or name.startswith("reserve_")]
    if divides and "kv_pool_bytes" in given:
        raise UsageError(f"{_flag(divides[0])} divides a GPU's memory, but --kv-pool says what is left of it")
    if divides and not has_gpu:
        raise UsageError(f"{_flag(divides[0])}: of what GPU?", remedy="give --gpu NAME or --gpu-memory SIZE as well")
    timed = [flag for name, flag in (("share", "--kv-saving"), ("kv_overhead_us", "--kv-overhead-us")) if name in given]
    if timed and not (has_gpu and "context" in given):
        raise UsageError(f"{timed[0]}: a step of what?", remedy="give --gpu NAME and --context TOKENS as well")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _gpu(options: dict[str, Any]) -> Gpu | None:
    from dataclasses import replace

    from memopt.compressor.capacity.gpus import Gpu, gpu_named

    given = {
        field: options.pop(option)
        for option, field in (
            ("gpu_memory", "memory_bytes"),
            ("gpu_bandwidth", "bandwidth_bytes_per_second"),
            ("gpu_flops", "bf16_flops"),
            ("gpu_fp8_flops", "fp8_flops"),
        )
        if option in options
    }
    name = options.pop("gpu", None)
    if name is not None:
        known = gpu_named(name)
        return replace(known, **given, source=f"{known.source}; some figures as given") if given else known
    if "memory_bytes" not in given:
        if given:
            raise UsageError("how much memory has the GPU?", remedy="give --gpu NAME or --gpu-memory SIZE")
        return None
    return Gpu("given", **given)


def capacity_request(options: dict[str, Any]) -> CapacityRequest | None:
    """What the capacity options ask for; None if none was given. Raises UsageError for what makes no sense."""
    from memopt.compressor.capacity.kv_bytes import CacheFormat
    from memopt.compressor.capacity.request import CapacityRequest, ReserveChoice

    given = {name: value for name, value in options.items() if value is not None}
    if not given:
        return None
    _require_used(given)
    gpu = _gpu(given)
    reserves = {name: given.pop(f"reserve_{name}") for name in _RESERVES if f"reserve_{name}" in given}
    for name in ("kv_format", "prefill_kv_format"):
        if name in given:
            given[name] = CacheFormat(given[name])
    if "kv_overhead_us" in given:
        given["overhead_seconds"] = given.pop("kv_overhead_us") / _MICROSECONDS_PER_SECOND
    return CapacityRequest(gpu=gpu, reserves=ReserveChoice(**reserves), **given)
