"""The engine that `memopt generate` asks for: its options, its construction, and its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from memopt.cli.options import MAX_DEGREE

if TYPE_CHECKING:
    from memopt.manifests.policy import TrustPolicy
    from memopt.runtime.engine.engine import Engine
    from memopt.runtime.engine.engine_options import DtypeChoice
    from memopt.runtime.weights.load_options import WeightChoice

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class EngineArguments:
    """The options that `engine_options` adds; None: the engine's own choice."""

    kv_cache: str
    weights: WeightChoice
    dtype: DtypeChoice
    device: str
    integrity: str
    tensor_parallel: int
    context: int | None
    kv_cache_gib: float | None
    prefix_cache: bool
    speculative: bool


def engine_options(function: Function) -> Function:
    """--kv-cache, --weights, --dtype and the like, as the fields of EngineArguments."""
    decorators = [
        click.option(
            "--kv-cache",
            type=click.Choice(["bf16", "fp8_e4m3", "fp8_ds_mla"]),
            default="bf16",
            show_default=True,
            help="Format of the KV cache, whatever the weights' is.",
        ),
        click.option(
            "--weights",
            type=click.Choice(["released", "bf16"]),
            default="released",
            show_default=True,
            help="As they are in RELEASE, or dequantized to BF16 while they are loaded.",
        ),
        click.option(
            "--dtype",
            type=click.Choice(["auto", "bfloat16", "float32"]),
            default="auto",
            show_default=True,
            help="float32: a prompt's answer does not depend on what else runs, to the bit (CPU).",
        ),
        click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True),
        click.option(
            "--integrity",
            type=click.Choice(["noop", "tagged"]),
            default="noop",
            show_default=True,
            help="tagged: abort a request whose KV page is no longer its own.",
        ),
        click.option(
            "--tp",
            "tensor_parallel",
            metavar="N",
            type=click.IntRange(1, MAX_DEGREE),
            default=1,
            show_default=True,
            help="Tensor-parallel ranks; start them with torchrun --nproc-per-node N.",
        ),
        click.option(
            "--context", metavar="TOKENS", type=click.IntRange(1), default=None, help="Longest prompt and answer."
        ),
        click.option(
            "--kv-cache-gib", type=click.FloatRange(0, min_open=True), default=None, help="Memory for the KV cache."
        ),
        click.option("--prefix-cache", is_flag=True, help="Compute a beginning that prompts share once."),
        click.option("--speculative", is_flag=True, help="Draft with the MTP layer, verify with the model."),
    ]
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


def open_engine(release: str, trust: TrustPolicy, arguments: EngineArguments) -> Engine:
    """The engine of a release that `trust` accepts. Raises what Engine raises."""
    import torch

    from memopt.runtime.engine.engine import Engine

    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return Engine(
        release,
        policy=trust,
        weights=arguments.weights,
        kv_cache=arguments.kv_cache,
        integrity=arguments.integrity,
        tensor_parallel=arguments.tensor_parallel,
        dtype=arguments.dtype,
        kv_cache_gib=arguments.kv_cache_gib,
        max_tokens=arguments.context,
        prefix_cache=arguments.prefix_cache,
        speculative=arguments.speculative,
        device=device,
    )
