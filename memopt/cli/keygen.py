"""`memopt keygen`: a new key to sign releases with."""

from __future__ import annotations

import os
from pathlib import Path

import click

from memopt.cli.options import json_option
from memopt.cli.output import print_verdict, refusals
from memopt.cli.passphrase import ask_new_passphrase, given_passphrase, passphrase_options
from memopt.errors import MemoptIOError, OutputError, UsageError


@click.command("keygen")
@click.argument("output", metavar="OUT.pem", type=click.Path())
@click.option("--curve", type=click.Choice(["p256", "p384", "p521"]), default="p256", help="Default p256.")
@passphrase_options
@click.option("--no-passphrase", is_flag=True, help="Write the private key in the clear (for a secret store).")
@json_option
def keygen_command(
    output: str, curve: str, passphrase_file: str | None, passphrase_env: str | None, no_passphrase: bool, as_json: bool
) -> None:
    """Write a private key to OUT.pem (mode 0600) and its public key to OUT.pub.

    Asks for a passphrase unless an option says where it is. Existing files are never overwritten.
    """
    with refusals("keygen", as_json=as_json):
        from memopt.manifests.keys import generate_private_key

        private_path = Path(output)
        public_path = private_path.with_suffix(".pub") if private_path.suffix == ".pem" else Path(f"{output}.pub")
        if private_path.suffix == ".pub":
            raise UsageError(f"{output} is the private key's name", remedy="name it like release.pem")
        for path in (private_path, public_path):
            if os.path.lexists(path):
                raise _exists(path)
        passphrase = given_passphrase(passphrase_file, passphrase_env)
        if no_passphrase and passphrase is not None:
            raise UsageError("--no-passphrase excludes a passphrase")
        if passphrase is None and not no_passphrase:
            passphrase = ask_new_passphrase()
        key = generate_private_key(curve)
        _write_new({private_path: (key.to_pem(passphrase), 0o600), public_path: (key.public_key.pem, 0o644)})
        fields = {"hint": key.public_key.hint, "curve": curve, "spki_sha256": key.public_key.spki_sha256}
        if as_json:
            files = {"private_key": str(private_path), "public_key": str(public_path)}
            print_verdict("keygen", fields | files | {"is_encrypted": passphrase is not None})
        else:
            secrecy = "encrypted" if passphrase is not None else "NOT encrypted"
            click.echo(f"private key  {private_path}  ({secrecy}, mode 0600)\npublic key   {public_path}")
            click.echo(f"hint         {key.public_key.hint}")


def _exists(path: Path) -> OutputError:
    return OutputError("exists already and is never overwritten", file=str(path), remedy="name another file")


def _write_new(files: dict[Path, tuple[bytes, int]]) -> None:
    """Create every file with its bytes and mode, or none of them."""
    created: list[Path] = []
    try:
        for path, (raw, mode) in files.items():
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            except FileExistsError:
                raise _exists(path) from None
            except OSError as problem:
                raise MemoptIOError(f"cannot create: {problem.strerror}", file=str(path)) from None
            created.append(path)
            with open(descriptor, "wb") as stream:
                stream.write(raw)
                stream.flush()
                os.fsync(descriptor)
    except BaseException:
        for path in created:
            path.unlink(missing_ok=True)
        raise
