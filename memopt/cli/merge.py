"""`memopt merge`: the ranks of a release are put together to a hub release."""

from __future__ import annotations

import click

from memopt.cli.options import json_option, workers_option
from memopt.cli.output import refusals
from memopt.cli.release_trust import load_release_trust, release_trust_options, say_unverified


@click.command("merge")
@click.argument("release", metavar="RELEASE")
@click.argument("out", metavar="OUT")
@release_trust_options
@workers_option
@json_option
def merge_command(
    release: str, out: str, policy: str | None, verify_key: str | None, workers: int | None, as_json: bool
) -> None:
    """Put the rank files of RELEASE together to the hub release that they came from, in a new folder OUT.

    The inverse of `memopt shard`. Only rank files are read: every slice is compared with the ledger, then the whole.
    OUT is unsigned. Run the same command again after an interruption and it goes on.
    """
    with refusals("merge", as_json=as_json):
        from memopt.cli.run import progress_display, report
        from memopt.compressor.ranks.api import merge

        trust = load_release_trust(policy, verify_key)
        with progress_display(quiet=as_json) as progress:
            result = merge(release, out, policy=trust, workers=workers, progress=progress)
        if not as_json:
            say_unverified(release, result.source_root_digest)
        report("merge", result, f"memopt sign {out} --key release.pem", as_json=as_json)
