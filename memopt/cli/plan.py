"""`memopt plan`: every tensor's fate and every output byte, before any work."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from memopt.cli.options import json_option, plan_options, recipe_option, workers_option
from memopt.cli.output import print_verdict, refusals
from memopt.errors import UsageError


@click.command("plan")
@click.argument("source", metavar="SRC", required=False)
@recipe_option
@click.option("--config", "config", metavar="FILE", default=None, help="Plan from a config.json alone, without SRC.")
@plan_options
@workers_option
@json_option
def plan_command(
    source: str | None,
    recipe: str | None,
    config: str | None,
    tensor_parallel: int | None,
    max_file_size: int | None,
    allow_code: bool,
    release_name: str | None,
    workers: int | None,
    as_json: bool,
) -> None:
    """Show what `memopt compress SRC` would do: fates, exact file sizes, engine lint, time and memory."""
    with refusals("plan", as_json=as_json):
        if (source is None) == (config is None):
            raise UsageError("give SRC or --config FILE, one of them", remedy="memopt plan --help")
        from memopt.compressor import api
        from memopt.compressor.estimate import estimate
        from memopt.compressor.pipeline import planned_sizes

        options = build_options(tensor_parallel, max_file_size, allow_code, release_name)
        if config is not None:
            plan = api.plan_config(config, recipe, options=options)
        else:
            plan = api.plan(source or "", recipe, options=options)
        sizes = planned_sizes(plan)
        guess = estimate(plan, workers or api.default_workers())
        if as_json:
            print_verdict("plan", plan_fields(plan, sizes, asdict(guess)))
        else:
            from memopt.cli.tables import make_console, print_plan

            print_plan(make_console(), plan, sizes, guess)


def build_options(
    tensor_parallel: int | None, max_file_size: int | None, allow_code: bool, release_name: str | None
) -> Any:
    """PlanOptions from the command line's values."""
    from memopt.compressor.plan import PlanOptions
    from memopt.compressor.units import DEFAULT_MAX_FILE_BYTES

    max_file_bytes = DEFAULT_MAX_FILE_BYTES if max_file_size is None else max_file_size
    return PlanOptions(max_file_bytes, tensor_parallel, allow_code, release_name)


def plan_fields(plan: Any, sizes: dict[str, int], guess: dict[str, Any]) -> dict[str, Any]:
    """The plan for machines: one row a logical tensor, one a file."""
    return {
        "family": plan.family,
        "recipe": plan.recipe.name,
        "tensor_parallel": plan.tensor_parallel,
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
