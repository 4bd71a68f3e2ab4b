"""The `memopt` command."""

from __future__ import annotations

import io
import os
import sys
from importlib import import_module

import click

from memopt.cli.output import refuse
from memopt.errors import InterruptedRunError, MemoptError, UnsupportedError, UsageError
from memopt.version import __version__

# Command -> module that defines it; loaded only when asked for, so that `memopt verify` never waits for numba.
_COMMANDS = {
    "inspect": "memopt.cli.inspect",
    "plan": "memopt.cli.plan",
    "compress": "memopt.cli.compress",
    "dequantize": "memopt.cli.dequantize",
    "evaluate": "memopt.cli.evaluate",
    "shard": "memopt.cli.shard",
    "merge": "memopt.cli.merge",
    "keygen": "memopt.cli.keygen",
    "key": "memopt.cli.key",
    "sign": "memopt.cli.sign",
    "verify": "memopt.cli.verify",
    "exec": "memopt.cli.exec",
    "generate": "memopt.cli.generate",
    "push": "memopt.cli.push",
    "pull": "memopt.cli.pull",
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


def _unexpected(problem: Exception) -> MemoptError:
    if isinstance(problem, ModuleNotFoundError) and not (problem.name or "memopt").startswith("memopt"):
        # The verifier's image (deploy/Dockerfile) holds what `verify` and `exec` need, and no more.
        remedy = "install memopt with its dependencies: pip install memopt"
        return UnsupportedError(f"this installation has no Python package {problem.name}", remedy=remedy)
    remedy = "a bug: please report it, with MEMOPT_TRACEBACK=1 set for details"
    return MemoptError(f"{type(problem).__name__}: {problem}", remedy=remedy)


def main() -> None:
    """Entry point: whatever goes wrong is one line (and, with --json, one verdict) and its exit code, no traceback.

    A wrong call is MEMOPT_USAGE. An unexpected error is MEMOPT_INTERNAL; MEMOPT_TRACEBACK=1 shows where it came from.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show a character gets its escape, not a fault.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        cli(prog_name="memopt", standalone_mode=False)
        return
    except click.exceptions.NoArgsIsHelpError as problem:
        problem.show()
        sys.exit(problem.exit_code)
    except click.UsageError as problem:
        context = problem.ctx
        command = (context.info_name or "") if context is not None and context.parent is not None else ""
        error: MemoptError = UsageError(problem.format_message(), remedy=f"see `{f'memopt {command}'.strip()} --help`")
    except click.Abort:
        command, error = "", InterruptedRunError("stopped before anything was written")
    except Exception as problem:
        if os.environ.get("MEMOPT_TRACEBACK"):
            raise
        command, error = "", _unexpected(problem)
    refuse(command, error, as_json="--json" in sys.argv[1:], exit_code=int(error.exit_code))
