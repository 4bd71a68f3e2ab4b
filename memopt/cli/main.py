"""The `memopt` command."""

from __future__ import annotations

import sys
from importlib import import_module

import click

from memopt.errors import ExitCode
from memopt.version import __version__

# Command -> module that defines it; loaded only when asked for, so that `memopt verify` never waits for numba.
_COMMANDS = {
    "inspect": "memopt.cli.inspect",
    "plan": "memopt.cli.plan",
    "compress": "memopt.cli.compress",
    "dequantize": "memopt.cli.dequantize",
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = _COMMANDS.get(cmd_name)
        return getattr(import_module(module), f"{cmd_name}_command") if module else None


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="memopt")
def cli() -> None:
    """FP8 GLM and Kimi checkpoints become INT4 releases that a serving fleet can trust.

    Exit codes: 0 ok, 1 internal, 2 usage, 3 signature, 4 content, 5 policy, 6 layout, 7 I/O (retry), 8 malformed
    input, 9 unsupported, 130 interrupted.
    """


def main() -> None:
    """Entry point; an unexpected error is one line and exit code 1, with the traceback only under MEMOPT_TRACEBACK."""
    try:
        cli(prog_name="memopt")
    except Exception as problem:
        import os

        if os.environ.get("MEMOPT_TRACEBACK"):
            raise
        reason = " ".join(str(problem).split())
        click.echo(
            f"memopt: MEMOPT_INTERNAL: {type(problem).__name__}: {reason} "
            "(a bug: please report it, with MEMOPT_TRACEBACK=1 set for details)",
            err=True,
        )
        sys.exit(int(ExitCode.INTERNAL))
