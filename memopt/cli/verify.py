"""`memopt verify`: is this release the one that somebody trusted signed, whole and unchanged?"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from memopt.cli.options import json_option
from memopt.cli.output import duration_text, echo_quietly, one_line, refusals, size_text
from memopt.cli.rank_options import rank_layout_options
from memopt.cli.termination_log import termination_log_option, termination_message
from memopt.cli.trust_options import jobs_option, load_trust, trust_options

if TYPE_CHECKING:
    from memopt.manifests.verdict import Finding, Verdict

MAX_PRINTED_LINES = 100


@click.command("verify")
@click.argument("folder", metavar="DIR")
@trust_options
@click.option(
    "--rank",
    "ranks",
    metavar="N",
    type=click.IntRange(0, 4095),
    multiple=True,
    help="Look only at what rank N needs; again for further ranks.",
)
@rank_layout_options
@jobs_option
@click.option("--quick", is_flag=True, help="Do not hash weights, only their headers; the verdict says partial.")
@click.option("--strict", is_flag=True, help="Refuse hard links and empty folders too.")
@click.option("--allow-linked-root", is_flag=True, help="DIR itself may be a symbolic link.")
@termination_log_option
@json_option
def verify_command(
    folder: str,
    policy: str | None,
    key: str | None,
    ranks: tuple[int, ...],
    tensor_parallel: int | None,
    expert_parallel: int | None,
    jobs: int | None,
    quick: bool,
    strict: bool,
    allow_linked_root: bool,
    termination_log: str | None,
    as_json: bool,
) -> None:
    """Verify the release in folder DIR against a trust policy or a public key.

    Signature, identity, counter and expiry, the set of files (an unlisted one is a refusal), and every byte. Nothing
    is written into DIR. All that is wrong is listed; the exit code is that of the worst: signature 3, policy 5,
    malformed 8, unsupported 9, layout 6, content 4, I/O 7.
    """
    with refusals("verify", as_json=as_json), termination_message("verify", termination_log) as message:
        from memopt.cli.hash_progress import HashProgress
        from memopt.manifests.verdict_json import verdict_fields
        from memopt.manifests.verify import VerifyOptions, verify_release

        trust = load_trust(policy, key)
        options = VerifyOptions(
            ranks or None,
            jobs,
            quick,
            strict,
            None,
            allow_linked_root,
            tensor_parallel=tensor_parallel,
            expert_parallel=expert_parallel,
        )
        verdict = verify_release(folder, trust, options, HashProgress())
        fields = verdict_fields(verdict)
        message.update(fields)
        if as_json:
            echo_quietly(json.dumps(fields))
        elif verdict.is_ok:
            for line in summary_lines(verdict):
                echo_quietly(line)
        if not verdict.is_ok:
            print_findings("verify", verdict)
    sys.exit(verdict.exit_code)


def summary_lines(verdict: Verdict) -> list[str]:
    """What was verified, for people."""
    name = "a release without a memopt manifest" if verdict.identity is None else verdict.identity
    counter = "" if verdict.counter is None else f", counter {verdict.counter}"
    rate = verdict.verified_bytes / 1e9 / max(verdict.seconds, 1e-9)
    part = "PARTIAL     " if verdict.is_partial else "verified    "
    lines = [
        f"{part}{one_line(name)}{counter}",
        f"files       {verdict.num_verified_files} of {verdict.num_files}, {size_text(verdict.verified_bytes)} in"
        f" {duration_text(verdict.seconds)}, {rate:.2f} GB/s",
        f"signed by   {', '.join(verdict.key_hints)}",
        f"root digest {verdict.root_digest}",
    ]
    return lines + [f"warning     {one_line(warning)}" for warning in verdict.warnings[:MAX_PRINTED_LINES]]


def finding_line(command: str, finding: Finding) -> str:
    """One finding as one line: code, file, what is wrong, what to do."""
    place = "" if finding.file is None or finding.file in finding.message else f"{finding.file}: "
    remedy = f" ({finding.remedy})" if finding.remedy else ""
    return one_line(f"memopt {command}: {finding.code}: {place}{finding.message}{remedy}")


def print_findings(command: str, verdict: Verdict) -> None:
    """Every finding on a line of standard error, those that gave the exit code first."""
    ordered = sorted(verdict.findings, key=lambda finding: finding.exit_code != verdict.exit_code)
    for finding in ordered[:MAX_PRINTED_LINES]:
        echo_quietly(finding_line(command, finding), err=True)
    if len(ordered) > MAX_PRINTED_LINES:
        echo_quietly(f"memopt {command}: {len(ordered) - MAX_PRINTED_LINES:,} more findings, see --json", err=True)
