"""Who signs a release and what the signature says: options that `memopt sign` and `memopt compress` share."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from memopt.cli.passphrase import load_signing_key, open_mode_option, passphrase_options
from memopt.errors import UsageError

if TYPE_CHECKING:
    from memopt.manifests.sign import SignOptions
    from memopt.manifests.signer import Signer

Function = TypeVar("Function", bound=Callable[..., Any])
_DAYS = re.compile(r"([1-9][0-9]{0,4})d")
SECONDS_A_DAY = 86400


@dataclass(frozen=True)
class SigningArguments:
    """The values of the options, as given."""

    key: tuple[str, ...]
    sign_cmd: str | None
    public_key: str | None
    identity: str | None
    counter: int | None
    not_after: str | None
    previous: str | None
    passphrase_file: str | None
    passphrase_env: str | None
    allow_open_mode: bool


def signing_options(function: Function) -> Function:
    """Add every option that SigningArguments holds; the command gets them as keyword arguments of those names."""
    decorators = [
        click.option(
            "--key", metavar="FILE", multiple=True, help="A private key (PEM) that signs; again for more of them."
        ),
        click.option(
            "--sign-cmd",
            metavar="CMD",
            default=None,
            help="A command that signs (HSM, KMS): bytes to sign on stdin, DER signature on stdout; with --public-key.",
        ),
        click.option("--public-key", metavar="FILE", default=None, help="The public key (PEM) of --sign-cmd."),
        click.option("--identity", default=None, help="The signed name (default: the name in release.json)."),
        click.option(
            "--counter",
            type=click.IntRange(0, 2**53 - 1),
            default=None,
            help="Rises with every release of that name (default: one more than --previous, or 1).",
        ),
        click.option(
            "--not-after",
            metavar="TIME",
            default=None,
            help="Expiry: 2027-01-31, 2027-01-31T12:00:00Z or 90d.",
        ),
        click.option("--previous", metavar="DIR", default=None, help="The release before this one, or its manifest."),
        passphrase_options,
        open_mode_option,
    ]
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


def is_signing_asked(arguments: SigningArguments) -> bool:
    """Whether somebody is to sign; UsageError for other signing options without a signer."""
    if arguments.key or arguments.sign_cmd is not None:
        return True
    if arguments != SigningArguments((), None, None, None, None, None, None, None, None, False):
        raise UsageError("nobody signs", remedy="give --key, or --sign-cmd and --public-key")
    return False


def load_signers(arguments: SigningArguments) -> list[Signer]:
    """The keys and the sign command that the options name, ready to sign; an empty list without any."""
    from memopt.manifests.keys import load_public_key
    from memopt.manifests.signer import CommandSigner, KeySigner

    signers: list[Signer] = [
        KeySigner(
            load_signing_key(
                path, arguments.passphrase_file, arguments.passphrase_env, allow_open_mode=arguments.allow_open_mode
            )
        )
        for path in arguments.key
    ]
    if (arguments.sign_cmd is None) != (arguments.public_key is None):
        raise UsageError("--sign-cmd and --public-key need each other")
    if arguments.sign_cmd is not None and arguments.public_key is not None:
        try:
            argv = shlex.split(arguments.sign_cmd)
        except ValueError as problem:
            raise UsageError(f"--sign-cmd: {problem}") from None
        signers.append(CommandSigner(argv, load_public_key(arguments.public_key)))
    return signers


def build_sign_options(arguments: SigningArguments, jobs: int | None) -> SignOptions:
    """SignOptions from the command line's values; the time of signing is fixed here."""
    from memopt.manifests.sign import SignOptions, created_time

    created = created_time()
    return SignOptions(
        identity=arguments.identity,
        counter=arguments.counter,
        created=created,
        not_after=None if arguments.not_after is None else parse_expiry(arguments.not_after, created),
        previous=None if arguments.previous is None else Path(arguments.previous),
        jobs=jobs,
    )


def parse_expiry(text: str, created: int) -> int:
    """Seconds since 1970 from a date, a UTC time, or days after `created`; UsageError for anything else."""
    days = _DAYS.fullmatch(text)
    if days:
        return created + int(days[1]) * SECONDS_A_DAY
    for form in ("%Y-%m-%d", "%Y-%m-%dT%H:%M:%SZ"):
        try:
            return int(datetime.strptime(text, form).replace(tzinfo=UTC).timestamp())
        except ValueError:
            continue
    raise UsageError(f"--not-after {text!r:.80} is no time", remedy="use 2027-01-31, 2027-01-31T12:00:00Z or 90d")
