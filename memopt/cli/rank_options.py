"""Which one of several rank layouts a command means with --rank: --tp N or --ep N."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from memopt.manifests.rank_folders import MAX_RANKS

Function = TypeVar("Function", bound=Callable[..., Any])


def rank_layout_options(function: Function) -> Function:
    """--tp and --ep, as parameters `tensor_parallel` and `expert_parallel`."""
    degree = click.IntRange(1, MAX_RANKS)
    decorators = [
        click.option("--tp", "tensor_parallel", metavar="N", type=degree, help="With --rank: its files in tpN/."),
        click.option("--ep", "expert_parallel", metavar="N", type=degree, help="With --rank: its files in epN/."),
    ]
    for decorator in reversed(decorators):
        function = decorator(function)
    return function
