"""`memopt pull`: a release comes from the Hub and is verified before it counts."""

from __future__ import annotations

from dataclasses import asdict

import click

from memopt.cli.options import json_option
from memopt.cli.output import duration_text, one_line, print_verdict, refusals, size_text
from memopt.cli.trust_options import jobs_option, load_trust, trust_options


@click.command("pull")
@click.argument("repository", metavar="REPO[@REV]")
@click.argument("dest", metavar="DEST", type=click.Path())
@trust_options
@jobs_option
@click.option("--workers", type=click.IntRange(1, 64), default=4, help="Files that are fetched at a time (default 4).")
@json_option
def pull_command(
    repository: str,
    dest: str,
    policy: str | None,
    key: str | None,
    jobs: int | None,
    workers: int,
    as_json: bool,
) -> None:
    """Fetch the signed release in Hub repository REPO (org/name, at a branch, tag or commit) into DEST, and verify it.

    The release's files and no others come, all of one commit. Until everything verifies they lie in DEST.partial,
    where the same command goes on after an interruption; DEST appears only when it is whole and verified.
    """
    with refusals("pull", as_json=as_json):
        from memopt.cli.hash_progress import HashProgress
        from memopt.cli.transfer import transfer_display
        from memopt.compressor.fetch_release import PullOptions, pull_release
        from memopt.compressor.hub_release import repository as parse_repository
        from memopt.manifests.verify import VerifyOptions

        trusted = load_trust(policy, key)
        options = PullOptions(workers=workers, verify=VerifyOptions(jobs=jobs))
        with transfer_display(quiet=as_json) as display:
            result = pull_release(
                parse_repository(repository),
                dest,
                trusted,
                options,
                lambda now: display(now.stage, now.file, now.total_done_bytes, now.total_size_bytes),
                HashProgress(),
            )
        if as_json:
            print_verdict("pull", asdict(result) | {"dest": str(result.dest)})
            return
        counter = "" if result.counter is None else f", counter {result.counter}"
        click.echo(f"pulled      {result.repository}@{result.revision} into {result.dest}")
        click.echo(f"commit      {result.commit}")
        click.echo(f"release     {one_line(result.identity or 'without identity')}{counter}")
        click.echo(f"root digest {result.root_digest}")
        click.echo(
            f"verified    {result.num_files} files, {size_text(result.size_bytes)}, in {duration_text(result.seconds)}"
        )
        if result.left_out:
            names = one_line(", ".join(result.left_out))
            click.echo(f"left there  {len(result.left_out)} remote files that the release does not list: {names}")
        for warning in result.warnings:
            click.echo(f"warning     {one_line(warning)}")
