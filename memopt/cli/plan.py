"""`memopt plan`: every tensor's fate and every output byte, before any work."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import click

from memopt.cli.capacity_options import capacity_options, capacity_request
from memopt.cli.options import json_option, plan_options, recipe_option, workers_option
from memopt.cli.output import print_verdict, refusals
from memopt.errors import UsageError


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection meanwhile: a plan is a million live objects, and going through them finds nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@click.command("plan")
@click.argument("source", metavar="[SRC]", required=False)
@recipe_option
@click.option("--config", "config", metavar="FILE", default=None, help="Plan from a config.json alone, without SRC.")
@plan_options
@capacity_options
@click.option(
    "--kv-formula",
    metavar="SIZES",
    default=None,
    help="KV cache of a dense model, without SRC: layers=64,kv_heads=8,head_dim=128,tokens=32768,requests=16.",
)
@workers_option
@json_option
def plan_command(
    source: str | None,
    recipe: str | None,
    config: str | None,
    tensor_parallel: int | None,
    expert_parallel: int | None,
    layout: str | None,
    max_file_size: int | None,
    allow_code: bool,
    release_name: str | None,
    kv_formula: str | None,
    workers: int | None,
    as_json: bool,
    **capacity: Any,
) -> None:
    """Show what `memopt compress SRC` would do: fates, exact file sizes, engine lint, time and memory.

    With --gpu (or another option of it): what fits on --tp GPUs, and what bounds their speed (docs/capacity.md).
    """
    with refusals("plan", as_json=as_json), _uncollected():
        request = capacity_request(capacity)
        if kv_formula is not None:
            beside = (source, recipe, config, tensor_parallel, expert_parallel, layout, max_file_size, release_name)
            if any(value is not None for value in (*beside, workers, request)) or allow_code:
                raise UsageError("--kv-formula stands alone", remedy="give no SRC and no other option but --json")
            _answer_formula(kv_formula, as_json=as_json)
            return
        if (source is None) == (config is None):
            raise UsageError("give SRC or --config FILE, one of them", remedy="memopt plan --help")
        from memopt.compressor import api
        from memopt.compressor.capacity.capacity_plan import plan_capacity, plan_weights, planned_layout
        from memopt.compressor.compress_job import planned_sizes
        from memopt.compressor.estimate import estimate

        options = build_options(
            tensor_parallel, max_file_size, allow_code, release_name, expert_parallel=expert_parallel, layout=layout
        )
        if config is not None:
            plan = api.plan_config(config, recipe, options=options)
        else:
            plan = api.plan(source or "", recipe, options=options)
        weights = plan_weights(plan)
        room = None if request is None else plan_capacity(plan, request)
        sizes = planned_sizes(plan)
        guess = estimate(plan, workers or api.default_workers())
        if as_json:
            from memopt.cli.capacity_fields import capacity_fields, weights_fields

            fields = plan_fields(plan, sizes, asdict(guess))
            fields["weights_per_gpu"] = weights_fields(weights)
            fields["capacity"] = None if room is None else capacity_fields(room)
            print_verdict("plan", fields)
        else:
            from memopt.cli.capacity_tables import print_capacity, print_weights_line
            from memopt.cli.tables import make_console, print_plan

            console = make_console()
            print_plan(console, plan, sizes, guess)
            print_weights_line(console, weights, planned_layout(plan).folder)
            if room is not None:
                print_capacity(console, room)


def _answer_formula(text: str, *, as_json: bool) -> None:
    from memopt.cli.capacity_fields import dense_cache_fields
    from memopt.cli.capacity_tables import print_dense_cache
    from memopt.cli.tables import make_console
    from memopt.compressor.capacity.kv_formula import parse_dense_cache

    cache = parse_dense_cache(text)
    if as_json:
        print_verdict("plan", dense_cache_fields(cache))
    else:
        print_dense_cache(make_console(), cache)


def build_options(
    tensor_parallel: int | None,
    max_file_size: int | None,
    allow_code: bool,
    release_name: str | None,
    *,
    expert_parallel: int | None = None,
    layout: str | None = None,
) -> Any:
    """PlanOptions from the command line's values."""
    from memopt.compressor.plan import PlanOptions
    from memopt.compressor.units import DEFAULT_MAX_FILE_BYTES

    max_file_bytes = DEFAULT_MAX_FILE_BYTES if max_file_size is None else max_file_size
    return PlanOptions(
        max_file_bytes,
        tensor_parallel,
        allow_code,
        release_name,
        expert_parallel,
        layout,  # type: ignore[arg-type]  # click.Choice gives one of the three
    )


def plan_fields(plan: Any, sizes: dict[str, int], guess: dict[str, Any]) -> dict[str, Any]:
    """The plan for machines: one row a logical tensor, one a file."""
    return {
        "family": plan.family,
        "recipe": plan.recipe.name,
        "tensor_parallel": plan.tensor_parallel,
        "layouts": list(plan.layouts.names),
        "source_tensors": len(plan.source.tensors),
        "source_size_bytes": plan.source.size_bytes,
        "weights_size_bytes": plan.weights_size_bytes,
        "total_size_bytes": sum(sizes.values()),
        "fates": {str(fate): count for fate, count in plan.fate_counts.items()},
        "files": [{"name": name, "size_bytes": size} for name, size in sizes.items()],
        "not_copied": [asdict(skipped) for skipped in plan.skipped_files],
        "quantization_config": plan.quantization,
        "engine_notes": [asdict(note) for note in plan.notes],
        "estimate": guess,
        "tensors": [
            {
                "name": tensor.source.spec.name,
                "role": str(tensor.source.spec.role),
                "fate": str(tensor.fate),
                "from": tensor.source.description,
                "to": tensor.output_format,
                "reason": tensor.reason,
                "size_bytes": sum(output.size_bytes for output in tensor.outputs),
            }
            for tensor in plan.tensors
        ],
    }
