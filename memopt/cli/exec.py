"""`memopt exec`: verify a release, then become the command that serves it; on failure the command never starts."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import sys
from dataclasses import replace

import click

from memopt.cli.hash_progress import HashProgress
from memopt.cli.output import echo_quietly, refusals
from memopt.cli.rank_options import rank_layout_options
from memopt.cli.termination_log import termination_log_option, termination_message
from memopt.cli.trust_options import jobs_option, load_trust, trust_options
from memopt.cli.verify import print_findings, summary_lines
from memopt.errors import OutputError, UsageError
from memopt.manifests.policy import TrustPolicy
from memopt.manifests.tree import open_root
from memopt.manifests.trusted_release import load_trusted
from memopt.manifests.verdict import Verdict
from memopt.manifests.verdict_json import verdict_fields
from memopt.manifests.verify import VerifyOptions, verify_release

PLACEHOLDER = "{}"


@click.command("exec")
@click.argument("folder", metavar="DIR")
@trust_options
@click.option("--rank", metavar="N", type=click.IntRange(0, 4095), default=None, help="Only what rank N needs.")
@rank_layout_options
@jobs_option
@click.option(
    "--stage",
    "dest",
    metavar="DEST",
    default=None,
    help="Copy the verified bytes into the new private folder DEST (a tmpfs or volume) and serve that.",
)
@click.option("--allow-linked-root", is_flag=True, help="DIR itself may be a symbolic link.")
@termination_log_option
@click.argument("command", metavar="-- CMD...", nargs=-1, required=True, type=click.UNPROCESSED)
def exec_command(
    folder: str,
    policy: str | None,
    key: str | None,
    rank: int | None,
    tensor_parallel: int | None,
    expert_parallel: int | None,
    jobs: int | None,
    dest: str | None,
    allow_linked_root: bool,
    termination_log: str | None,
    command: tuple[str, ...],
) -> None:
    """Verify the release in DIR, then replace this process by CMD. If DIR is refused, CMD never starts.

    An argument of CMD that is {} (or ends in ={}) becomes the folder to serve: DIR, or with --stage the verified copy;
    so does an argument that is DIR itself. With --stage there must be one.

    Without --stage CMD opens the files anew, by path: use it only where nobody can write to DIR, as on a read-only
    mount. --rank needs --stage: what other ranks need in DIR is not verified, and CMD would see it. A DEST that exists
    is served again if it is a private, unchanged copy of the release in DIR.
    """
    with refusals("exec", as_json=False):
        if rank is not None and dest is None:
            raise UsageError("--rank leaves files in DIR unverified that CMD would see", remedy="add --stage DEST")
        program = shutil.which(command[0])
        if program is None:
            raise UsageError(f"there is no command {command[0]!r}", remedy="check CMD and PATH")
        replaced = served_command(command, folder, dest if dest is not None else folder)
        if dest is not None and replaced == list(command):
            raise UsageError("CMD does not name the copy", remedy=f"put {PLACEHOLDER} where CMD takes the folder")
        with termination_message("exec", termination_log) as message:
            trust = load_trust(policy, key)
            options = VerifyOptions(
                None if rank is None else (rank,),
                jobs,
                allow_linked_root=allow_linked_root,
                tensor_parallel=tensor_parallel,
                expert_parallel=expert_parallel,
            )
            if dest is not None and not os.path.lexists(dest):
                _stage(folder, dest, trust, options)
            else:
                verdict = _verify(folder, dest, trust, options)
                if not verdict.is_ok:
                    message.update(verdict_fields(verdict, "exec"))
                    print_findings("exec", verdict)
                    echo_quietly("memopt exec: refused, CMD was not started", err=True)
                    sys.exit(verdict.exit_code)
                # Standard output belongs to CMD.
                for line in summary_lines(verdict):
                    echo_quietly(line, err=True)
        sys.stdout.flush()
        sys.stderr.flush()
        # Python ignores these two, and an ignored signal stays ignored through exec.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.execv(program, replaced)


def served_command(command: tuple[str, ...], folder: str, served: str) -> list[str]:
    """`command` with the folder to serve in place of {} and of `folder` itself, alone or as NAME={} and NAME=folder."""

    def replaced(argument: str) -> str:
        if argument in {PLACEHOLDER, folder}:
            return served
        for place in (PLACEHOLDER, folder):
            if argument.endswith("=" + place):
                return argument.removesuffix(place) + served
        return argument

    return [command[0], *(replaced(argument) for argument in command[1:])]


def _verify(folder: str, dest: str | None, trust: TrustPolicy, options: VerifyOptions) -> Verdict:
    """Verify what CMD will open: `folder`, or the copy in `dest` that this container made before it was restarted.

    Such a copy is served again only if it is private, of the very release in `folder`, and unchanged.
    """
    if dest is None:
        return verify_release(folder, trust, options, HashProgress())
    status = os.lstat(dest)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise OutputError("exists and is no private copy of ours", file=dest, remedy="name a new folder, or remove it")
    root_fd = open_root(folder, allow_link=options.allow_linked_root)
    try:
        wanted = load_trusted(root_fd, trust)
    finally:
        os.close(root_fd)
    verdict = verify_release(dest, trust, replace(options, strict=True, allow_linked_root=False), HashProgress())
    if verdict.is_ok and verdict.root_digest != wanted.root_digest:
        raise OutputError("is the copy of another release", file=dest, remedy="remove it, or name a new folder")
    return verdict


def _stage(folder: str, dest: str, trust: TrustPolicy, options: VerifyOptions) -> None:
    from memopt.manifests.release import open_release
    from memopt.manifests.stage import stage

    with open_release(folder, policy=trust, jobs=options.jobs, allow_linked_root=options.allow_linked_root) as release:
        path = stage(
            release,
            dest,
            rank=None if options.ranks is None else options.ranks[0],
            tensor_parallel=options.tensor_parallel,
            expert_parallel=options.expert_parallel,
        )
    echo_quietly(f"staged      verified bytes of {folder} in {path}", err=True)
