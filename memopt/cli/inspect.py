"""`memopt inspect`: what a checkpoint is, from its headers."""

from __future__ import annotations

import sys
from dataclasses import asdict

import click

from memopt.cli.options import json_option
from memopt.cli.output import print_verdict, refusals


@click.command("inspect")
@click.argument("source", metavar="SRC")
@json_option
def inspect_command(source: str, as_json: bool) -> None:
    """Tell family, formats, sizes, tensor-parallel degrees and problems of SRC, a folder or org/name@revision.

    Reads headers only. With problems, exits with the code of the first (6 for a missing file).
    """
    with refusals("inspect", as_json=as_json):
        from memopt.compressor.api import inspect

        found = inspect(source)
        exit_code = problem_exit_code(found.problems[0].code) if found.problems else 0
        if as_json:
            fields = asdict(found) | ({"code": found.problems[0].code} if found.problems else {})
            print_verdict("inspect", fields, exit_code=exit_code)
        else:
            from memopt.cli.tables import make_console, print_inspection

            print_inspection(make_console(), found)
    sys.exit(exit_code)


def problem_exit_code(code: str) -> int:
    """The exit code that a command would end with on this problem."""
    from memopt import errors

    for error in vars(errors).values():
        if isinstance(error, type) and issubclass(error, errors.MemoptError) and error.code == code:
            return int(error.exit_code)
    return int(errors.ExitCode.INTERNAL)
