"""`memopt shard`: a hub release becomes one with files for every rank."""

from __future__ import annotations

import click

from memopt.cli.options import json_option, rank_degree_options, workers_option
from memopt.cli.output import refusals
from memopt.cli.release_trust import load_release_trust, release_trust_options, say_unverified


@click.command("shard")
@click.argument("release", metavar="RELEASE")
@click.argument("out", metavar="OUT")
@rank_degree_options(tensor_parallel_help="Files for N tensor-parallel ranks.")
@click.option(
    "--layout",
    type=click.Choice(["tp", "both"]),
    default="both",
    help="Rank files alone (tp), or the hub files too (both, the default).",
)
@release_trust_options
@workers_option
@json_option
def shard_command(
    release: str,
    out: str,
    tensor_parallel: int | None,
    expert_parallel: int | None,
    layout: str,
    policy: str | None,
    verify_key: str | None,
    workers: int | None,
    as_json: bool,
) -> None:
    """Cut the hub files of RELEASE into rank files, in a new folder OUT.

    The same bytes as `memopt compress --tp N` at once: packed words and scales are cut, nothing is rounded again. Every
    tensor is compared with the ledger while it streams. OUT is unsigned: a signature holds for the files it was made
    for. Run the same command again after an interruption and it goes on.
    """
    with refusals("shard", as_json=as_json):
        from memopt.cli.run import progress_display, report
        from memopt.compressor.ranks.api import shard

        trust = load_release_trust(policy, verify_key)
        with progress_display(quiet=as_json) as progress:
            result = shard(
                release,
                out,
                tensor_parallel=tensor_parallel,
                expert_parallel=expert_parallel,
                layout=layout,  # type: ignore[arg-type]  # click.Choice gives one of the two
                policy=trust,
                workers=workers,
                progress=progress,
            )
        if not as_json:
            say_unverified(release, result.source_root_digest)
        report("shard", result, f"memopt sign {out} --key release.pem", as_json=as_json)
