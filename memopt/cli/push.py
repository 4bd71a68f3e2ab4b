"""`memopt push`: a verified release goes to the Hub."""

from __future__ import annotations

from dataclasses import asdict

import click

from memopt.cli.options import json_option
from memopt.cli.output import duration_text, print_verdict, refusals, size_text
from memopt.cli.trust_options import jobs_option, load_trust, trust_options


@click.command("push")
@click.argument("folder", metavar="DIR", type=click.Path())
@click.argument("repository", metavar="REPO[@BRANCH]")
@trust_options
@jobs_option
@click.option("--message", default=None, help="The commit's message (default: the release's identity).")
@click.option(
    "--delete-extra", is_flag=True, help="Delete remote files that the release lacks (without it they are a refusal)."
)
@json_option
def push_command(
    folder: str,
    repository: str,
    policy: str | None,
    key: str | None,
    jobs: int | None,
    message: str | None,
    delete_extra: bool,
    as_json: bool,
) -> None:
    """Verify release DIR, send it to Hub repository REPO (org/name) in one commit, and compare what is there then.

    The repository must exist; HF_TOKEN must be allowed to write to it. Nothing is sent if the release does not verify,
    nothing is written into DIR, and what the Hub has already is not sent again.
    """
    with refusals("push", as_json=as_json):
        from memopt.cli.hash_progress import HashProgress
        from memopt.cli.transfer import transfer_display
        from memopt.compressor.hub_release import repository as parse_repository
        from memopt.compressor.publish import PushOptions, push_release
        from memopt.manifests.verify import VerifyOptions

        trusted = load_trust(policy, key)
        options = PushOptions(delete_extra=delete_extra, message=message, verify=VerifyOptions(jobs=jobs))
        with transfer_display(quiet=as_json) as display:
            result = push_release(
                folder,
                parse_repository(repository),
                trusted,
                options,
                lambda file, done, total: display("upload", file, done, total),
                HashProgress(),
            )
        if as_json:
            print_verdict("push", asdict(result))
            return
        sent = (
            f"{len(result.sent_files)} files, {size_text(result.sent_size_bytes)}" if result.sent_files else "nothing"
        )
        click.echo(f"pushed      {folder} to {result.repository}@{result.branch}")
        click.echo(f"commit      {result.commit}")
        click.echo(f"root digest {result.root_digest}")
        click.echo(f"sent        {sent} of {size_text(result.size_bytes)} in {duration_text(result.seconds)}")
        if result.deleted_files:
            click.echo(f"deleted     {len(result.deleted_files)} remote files: {', '.join(result.deleted_files)}")
        click.echo(f"compared    all {result.num_files} remote files have the signed digests")
        click.echo(f"next        memopt pull {result.repository}@{result.commit} DEST --policy trust.json")
