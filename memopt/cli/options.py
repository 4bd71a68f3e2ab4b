"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from memopt.cli.output import parse_size

Function = TypeVar("Function", bound=Callable[..., Any])
# A mistyped degree is told as such; the formats allow a few times more.
MAX_DEGREE = 1024

json_option = click.option("--json", "as_json", is_flag=True, help="Print one machine-readable verdict.")
workers_option = click.option(
    "--workers", type=click.IntRange(1, 1024), default=None, help="Threads, one output file each (default: one a core)."
)


def _size(_context: click.Context, _parameter: click.Parameter, value: str | None) -> int | None:
    return None if value is None else parse_size(value)


max_file_size_option = click.option(
    "--max-file-size",
    metavar="SIZE",
    callback=_size,
    help="About the largest weight file, as 4GB or 500MiB (default 4GB).",
)


def recipe_option(function: Function) -> Function:
    return click.option(
        "--recipe", metavar="NAME|FILE", default=None, help="A shipped recipe or a YAML file (default: the family's)."
    )(function)


def rank_degree_options(*, tensor_parallel_help: str) -> Callable[[Function], Function]:
    """--tp and --ep, as parameters `tensor_parallel` and `expert_parallel`."""

    def decorate(function: Function) -> Function:
        degree = click.IntRange(1, MAX_DEGREE)
        decorators = [
            click.option("--tp", "tensor_parallel", metavar="N", type=degree, default=None, help=tensor_parallel_help),
            click.option(
                "--ep",
                "expert_parallel",
                metavar="N",
                type=degree,
                default=None,
                help="Files for N expert-parallel ranks: routed experts whole on one of them, the rest cut as by --tp.",
            ),
        ]
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def plan_options(function: Function) -> Function:
    """The options that shape a plan: --tp, --ep, --layout, --max-file-size, --allow-code, --name."""
    decorators = [
        rank_degree_options(
            tensor_parallel_help="Files for N tensor-parallel ranks; refused unless every tensor divides by N "
            "(default: no rank files, and the recipe's degree must divide)."
        ),
        click.option(
            "--layout",
            type=click.Choice(["hub", "tp", "both"]),
            default=None,
            help="Files for engines (hub), for ranks (tp: of --tp or --ep), or both "
            "(default: both with --tp or --ep above 1, else hub).",
        ),
        max_file_size_option,
        click.option("--allow-code", is_flag=True, help="Copy the source's .py files; release.json then lists them."),
        click.option("--name", "release_name", default=None, help="The release's name (default: the recipe's)."),
    ]
    for decorator in reversed(decorators):
        function = decorator(function)
    return function
