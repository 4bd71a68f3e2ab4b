"""`memopt key show`: which key a file holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from memopt.cli.options import json_option
from memopt.cli.output import print_verdict, refusals
from memopt.cli.passphrase import load_signing_key, open_mode_option, passphrase_options

if TYPE_CHECKING:
    from memopt.manifests.keys import PublicKey


@click.group("key")
def key_command() -> None:
    """Look at signing keys."""


@key_command.command("show")
@click.argument("file", metavar="FILE", type=click.Path())
@passphrase_options
@open_mode_option
@json_option
def show_command(
    file: str, passphrase_file: str | None, passphrase_env: str | None, allow_open_mode: bool, as_json: bool
) -> None:
    """Print hint, curve and SPKI digest of the private or public key in FILE.

    The hint is how signatures and trust.json name a key: SHA-256 of its public PEM. The SPKI digest is SHA-256 of the
    DER, as `openssl pkey -pubin -outform DER | sha256sum` prints it.
    """
    with refusals("key show", as_json=as_json):
        from memopt.manifests.keys import kind_of_key_file

        is_private = kind_of_key_file(file).endswith("PRIVATE KEY")
        if is_private:
            public = load_signing_key(file, passphrase_file, passphrase_env, allow_open_mode=allow_open_mode).public_key
        else:
            public = _public(file)
        kind = "private" if is_private else "public"
        if as_json:
            fields = {"kind": kind, "hint": public.hint, "curve": public.curve, "spki_sha256": public.spki_sha256}
            print_verdict("key show", fields | {"pem": public.pem.decode()})
        else:
            click.echo(f"{kind} key  {file}\nhint         {public.hint}\ncurve        {public.curve}")
            click.echo(f"SPKI SHA-256 {public.spki_sha256}")


def _public(file: str) -> PublicKey:
    from memopt.manifests.keys import load_public_key

    return load_public_key(file)
