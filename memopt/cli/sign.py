"""`memopt sign`: manifest, chunk digests, SHA256SUMS and signatures for a release."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from memopt.cli.options import json_option
from memopt.cli.output import print_verdict, refusals, size_text
from memopt.cli.signing_options import SigningArguments, build_sign_options, load_signers, signing_options
from memopt.cli.trust_options import jobs_option
from memopt.errors import UsageError


@click.command("sign")
@click.argument("folder", metavar="DIR")
@signing_options
@jobs_option
@json_option
def sign_command(folder: str, jobs: int | None, as_json: bool, **signing: Any) -> None:
    """Sign the release in folder DIR.

    Writes memopt.chunks, memopt.manifest.json, SHA256SUMS and model.sig, replacing those of an earlier signing;
    `model_signing verify key` and `sha256sum -c` accept them too. Refuses what no verifier would accept, and a
    release whose recipe's quality gate does not hold (`memopt evaluate`). The same inputs and
    SOURCE_DATE_EPOCH give the same bytes.
    """
    with refusals("sign", as_json=as_json):
        from memopt.cli.hash_progress import HashProgress
        from memopt.compressor.evaluate.gated_signing import sign_release

        arguments = SigningArguments(**signing)
        signers = load_signers(arguments)
        if not signers:
            raise UsageError("nobody signs", remedy="give --key, or --sign-cmd and --public-key")
        result = sign_release(folder, signers, build_sign_options(arguments, jobs), HashProgress())
        if as_json:
            print_verdict("sign", asdict(result) | {"key_hints": [signer.public_key.hint for signer in signers]})
            return
        click.echo(f"signed      {result.identity}, counter {result.counter}: {', '.join(result.signature_names)}")
        click.echo(f"files       {result.num_files}, {size_text(result.size_bytes)}")
        click.echo(f"root digest {result.root_digest}")
        for note in result.notes:
            click.echo(f"note        {note}")
        click.echo(f"next        memopt verify {folder} --key release.pub")
