"""Options of calibration: the data, how much of it runs, on what, and in how much memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from memopt.cli.output import parse_size
from memopt.errors import UsageError

if TYPE_CHECKING:
    from memopt.compressor.calibration_options import CalibrationOptions

Function = TypeVar("Function", bound=Callable[..., Any])


def _size(_context: click.Context, _parameter: click.Parameter, value: str | None) -> int | None:
    return None if value is None else parse_size(value)


@dataclass(frozen=True)
class CalibrationArguments:
    """The options as given; None where they were not."""

    calibration: str | None
    samples: int | None
    seq_len: int | None
    calibration_memory: int | None
    calibration_device: str | None
    coverage_tokens: int | None


def calibration_options(function: Function) -> Function:
    """--calibration and what goes with it."""
    decorators = [
        click.option(
            "--calibration",
            metavar="FILE",
            default=None,
            help='Data for method weighted or gptq: text.jsonl ({"text": …} a line) or ids.safetensors. The '
            "release has only its digest.",
        ),
        click.option("--samples", metavar="N", type=click.IntRange(1), default=None, help="Samples (default 512)."),
        click.option(
            "--seq-len", metavar="T", type=click.IntRange(2), default=None, help="Tokens of a sample (default 2048)."
        ),
        click.option(
            "--calibration-memory",
            metavar="SIZE",
            callback=_size,
            help="For Hessians and the work on them: more experts at a time (default 8GiB; same bytes).",
        ),
        click.option(
            "--calibration-device",
            type=click.Choice(["auto", "cpu", "cuda"]),
            default=None,
            help="Where layers run: cpu in float32, cuda in bfloat16 (default: cuda where there is one).",
        ),
        click.option(
            "--coverage-tokens",
            metavar="N",
            type=click.IntRange(1),
            default=None,
            help="Experts that fewer tokens choose get some of other experts' (default 256).",
        ),
    ]
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


def build_calibration(arguments: CalibrationArguments) -> CalibrationOptions | None:
    """The options, or None without --calibration; UsageError for the others without it."""
    from memopt.compressor.calibration_options import CalibrationOptions

    given = {
        "num_samples": arguments.samples,
        "sample_tokens": arguments.seq_len,
        "memory_bytes": arguments.calibration_memory,
        "device": arguments.calibration_device,
        "coverage_tokens": arguments.coverage_tokens,
    }
    known: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if arguments.calibration is None:
        if known:
            raise UsageError("calibration options without --calibration", remedy="name the data with --calibration")
        return None
    return CalibrationOptions(Path(arguments.calibration), **known)
