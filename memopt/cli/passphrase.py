"""Where a key's passphrase comes from: a file, an environment variable, or a prompt; never the command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from memopt.errors import KeyFileError, MemoptIOError, UsageError

if TYPE_CHECKING:
    from memopt.manifests.keys import PrivateKey

Function = TypeVar("Function", bound=Callable[..., Any])
_MAX_READ_BYTES = 4096


def passphrase_options(function: Function) -> Function:
    """--passphrase-file and --passphrase-env, as parameters `passphrase_file` and `passphrase_env`."""
    decorators = [
        click.option(
            "--passphrase-file",
            metavar="F",
            type=click.Path(),
            default=None,
            help="Read the key's passphrase from this file or pipe; one final line break is dropped.",
        ),
        click.option(
            "--passphrase-env", metavar="VAR", default=None, help="Take the key's passphrase from this variable."
        ),
    ]
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


open_mode_option = click.option(
    "--allow-open-mode", is_flag=True, help="Accept a private key file that others can read (a mounted secret)."
)


def given_passphrase(passphrase_file: str | None, passphrase_env: str | None) -> bytes | None:
    """The passphrase that the options name; None without any. Raises UsageError, KeyFileError, MemoptIOError."""
    if passphrase_file is not None and passphrase_env is not None:
        raise UsageError("--passphrase-file and --passphrase-env exclude each other")
    if passphrase_env is not None:
        if passphrase_env not in os.environ:
            raise UsageError(f"the environment variable {passphrase_env} is not set")
        return os.fsencode(os.environ[passphrase_env])
    return None if passphrase_file is None else _read_file(passphrase_file)


def _read_file(path: str) -> bytes:
    try:
        with open(path, "rb") as stream:
            raw = stream.read(_MAX_READ_BYTES + 1)
    except OSError as problem:
        raise MemoptIOError(f"cannot read the passphrase file: {problem.strerror}", file=path) from None
    if len(raw) > _MAX_READ_BYTES:
        raise KeyFileError(f"more than {_MAX_READ_BYTES:,} bytes, this is no passphrase", file=path)
    return raw.removesuffix(b"\n").removesuffix(b"\r")


def ask_new_passphrase() -> bytes | None:
    """Ask twice on the terminal; None for an empty answer (no encryption). Raises UsageError without a terminal."""
    if not sys.stdin.isatty():
        raise UsageError(
            "no terminal to ask for a passphrase",
            remedy="give --passphrase-file or --passphrase-env, or --no-passphrase for a key in the clear",
        )
    text = click.prompt(
        "Passphrase (empty for none)",
        hide_input=True,
        confirmation_prompt=True,
        default="",
        show_default=False,
        err=True,
    )
    return text.encode() or None


def load_signing_key(
    path: str, passphrase_file: str | None, passphrase_env: str | None, *, allow_open_mode: bool = False
) -> PrivateKey:
    """Load a private key for a command; an encrypted one is asked for on the terminal when no option names it."""
    from memopt.manifests.keys import kind_of_key_file, load_private_key

    passphrase = given_passphrase(passphrase_file, passphrase_env)
    if passphrase is None and kind_of_key_file(path) == "ENCRYPTED PRIVATE KEY" and sys.stdin.isatty():
        text = click.prompt(f"Passphrase of {path}", hide_input=True, default="", show_default=False, err=True)
        passphrase = text.encode()
    return load_private_key(path, passphrase, allow_open_mode=allow_open_mode)
