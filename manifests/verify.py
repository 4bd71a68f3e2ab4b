"""Verifying a release on disk: who signed it, may it be used, is it complete, is every byte the signed one.

Nothing is written, nothing is kept between two calls. What is wrong is listed, not raised; but after a signature that
does not hold nothing else is looked at, for nothing else can be believed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from memopt.errors import ContentError, ExitCode, LayoutError, MemoptError, UsageError
from memopt.manifests.code_check import check_code, config_names
from memopt.manifests.content import check_content
from memopt.manifests.digest import CHUNK_SIZE_BYTES, num_chunks
from memopt.manifests.file_names import CHUNKS_NAME, MANIFEST_NAME
from memopt.manifests.file_roles import LEDGER_NAME, is_weights, known_ranks, needed_files, ranks_of
from memopt.manifests.ledger_check import check_ledger
from memopt.manifests.rank_folders import MAX_RANKS, chosen_layout
from memopt.manifests.signed_files import SignedFiles
from memopt.manifests.swapped_files import SwappedFiles
from memopt.manifests.tree import Tree, open_root, scan_tree
from memopt.manifests.trusted_release import (
    TrustedRelease,
    check_tree,
    check_trust,
    load_trusted,
    missing,
    policy_errors,
    with_leaves,
    with_manifest,
)
from memopt.manifests.verdict import FindingList, Verdict
from memopt.manifests.weights_check import check_weights
from memopt.manifests.workers import default_jobs

if TYPE_CHECKING:
    from memopt.manifests.policy import TrustPolicy

__all__ = ["VerifyOptions", "load_trusted", "verify_release"]

MAX_RANK = MAX_RANKS - 1
# (bytes hashed, bytes to hash, file)
ProgressCallback = Callable[[int, int, str], None]


@dataclass(frozen=True)
class VerifyOptions:
    """`ranks`: look only at what these ranks need (None: all). `jobs`: threads (None: one a core).

    `quick`: do not hash weights, only their headers. `strict`: warnings (hard links, empty folders) refuse too.
    `now`: seconds since 1970, UTC (None: the clock's). `allow_linked_root`: the folder itself may be a symbolic link.
    `tensor_parallel`, `expert_parallel`: with `ranks`, which one of several rank layouts, by its number of ranks.
    """

    ranks: tuple[int, ...] | None = None
    jobs: int | None = None
    quick: bool = False
    strict: bool = False
    now: int | None = None
    allow_linked_root: bool = False
    tensor_parallel: int | None = None
    expert_parallel: int | None = None

    @property
    def layout(self) -> str | None:
        """The folder of the rank layout that is meant ("tp8"), None for any; UsageError as `chosen_layout`."""
        return chosen_layout(self.tensor_parallel, self.expert_parallel)


def verify_release(
    folder: str | Path,
    policy: TrustPolicy | str | Path | None,
    options: VerifyOptions | None = None,
    progress: ProgressCallback | None = None,
) -> Verdict:
    """Check a release against a trust policy (or a trust.json); the verdict lists everything that is wrong with it.

    Raises UsageError: no policy, no such folder, a rank that the release does not have; for a policy file also as
    `load_policy`. For a key use `policy_for_key`.
    """
    started = time.monotonic()
    options = options or VerifyOptions()
    if policy is None:
        raise UsageError("nobody is trusted: no policy and no key", remedy="give a trust policy or a public key")
    if isinstance(policy, (str, Path)):
        from memopt.manifests.policy import load_policy

        policy = load_policy(policy)
    _check_options(options)
    run = _Verification(policy, options, progress)
    try:
        root_fd = open_root(folder, allow_link=options.allow_linked_root)
    except UsageError:
        raise
    except MemoptError as problem:
        run.add(problem)
    else:
        try:
            run.check(root_fd)
        finally:
            os.close(root_fd)
    return run.verdict(time.monotonic() - started)


def _check_options(options: VerifyOptions) -> None:
    if options.jobs is not None and options.jobs < 1:
        raise UsageError(f"{options.jobs} jobs do nothing", remedy="use 1 or more")
    if options.ranks is not None and not options.ranks:
        raise UsageError("an empty list of ranks verifies nothing", remedy="leave it away, or name ranks")
    for rank in options.ranks or ():
        if not 0 <= rank <= MAX_RANK:
            raise UsageError(f"rank {rank} is not within 0 and {MAX_RANK}")
    if options.layout is not None and options.ranks is None:
        raise UsageError(f"{options.layout} is a layout of ranks, and no rank is named", remedy="name a rank")


class _Verification:
    """One verification and what it found."""

    def __init__(self, policy: TrustPolicy, options: VerifyOptions, progress: ProgressCallback | None) -> None:
        self._policy = policy
        self._options = options
        self._progress = progress
        self._now = int(time.time()) if options.now is None else options.now
        self._jobs = default_jobs() if options.jobs is None else options.jobs
        self._findings = FindingList()
        self._warnings: list[str] = []
        self._release: TrustedRelease | None = None
        self._verified: dict[str, int] = {}
        self._verified_chunks: dict[str, int] = {}
        self._num_needed = 0

    def add(self, problem: MemoptError) -> None:
        self._findings.add(problem)

    def check(self, root_fd: int) -> None:
        """All stages in their order (see trusted_release.py); each goes on with what the one before left sound."""
        try:
            self._release = release = check_trust(root_fd, self._policy, self._now)
        except MemoptError as problem:
            self.add(problem)
            return
        unusable: set[str] = set()
        try:
            self._release = release = with_manifest(root_fd, release)
        except MemoptError as problem:
            self.add(problem)
            unusable.add(MANIFEST_NAME)
        else:
            for error in policy_errors(release, self._policy, self._now):
                self.add(error)
        try:
            self._release = release = with_leaves(root_fd, release)
        except MemoptError as problem:
            self.add(problem)
            unusable.add(CHUNKS_NAME)
        tree = scan_tree(root_fd)
        needed = self._needed(release)
        self._num_needed = len(needed)
        readable = self._check_layout(tree, release, needed, unusable)
        files = SignedFiles(root_fd, release.signed_file)
        self._check_parts(files, release, readable)
        self._check_content(root_fd, release, readable)
        self._name_swapped(SwappedFiles(root_fd, release), release)

    def _needed(self, release: TrustedRelease) -> set[str]:
        ranks = _ranks_by_name(release)
        wanted = self._options.ranks
        layout = self._options.layout
        known = known_ranks(ranks, layout)
        if layout is not None and not known:
            raise UsageError(f"the release has no rank layout {layout}", remedy="name one that it has, or none")
        if wanted is not None and known and not set(wanted) <= known:
            absent = min(set(wanted) - known)
            place = "" if layout is None else f" in {layout}"
            raise UsageError(f"the release has no rank {absent}{place}", remedy=f"it has {len(known)} ranks, from 0 on")
        return needed_files(ranks, wanted, layout)

    def _check_layout(
        self, tree: Tree, release: TrustedRelease, needed: set[str], unusable: set[str]
    ) -> dict[str, int]:
        """Closed world: no file that is not signed, none missing. Gives the size of every file that can be checked.

        `unusable`: files with a finding already.
        """
        problems = check_tree(tree, release, self._policy)
        for error in problems:
            self.add(error)
        # Only places with a finding of their own: one that the policy waives hides no missing file.
        blocked = {problem.file or "" for problem in tree.problems if problem in problems}
        sizes: dict[str, int] = {}
        for name in sorted(release.digests):
            status = tree.files.get(name)
            if status is None:
                # A link or special file in its place is reported already.
                if name in needed and not any(f"{name}/".startswith(f"{place}/") for place in blocked):
                    self.add(missing(name))
                continue
            signed = release.sizes.get(name, status.size_bytes)
            if name in unusable:
                continue
            if status.size_bytes != signed:
                message = f"the file has {status.size_bytes:,} bytes, {signed:,} were signed"
                remedy = "fetch the file again; if it still differs, somebody changed it"
                self.add(ContentError(message, file=name, remedy=remedy))
            elif name in needed:
                sizes[name] = signed
            if status.num_links > 1:
                self._warn(name, f"has {status.num_links} hard links: another name reaches the same file")
        for name in tree.empty_folders:
            if not self._policy.allows_extra(name):
                self._warn(name, "is an empty folder that nobody signed")
        return sizes

    def _warn(self, name: str, message: str) -> None:
        if self._options.strict:
            self.add(LayoutError(message, file=name, remedy="remove it, or do without strict"))
        else:
            self._warnings.append(f"{name if name.isprintable() else ascii(name)}: {message}")

    def _check_parts(self, files: SignedFiles, release: TrustedRelease, readable: Mapping[str, int]) -> None:
        """Code, configuration, index, headers and ledger: what an engine would do with the release."""
        names = release.digests.keys()
        problems = check_code(names, files, readable.keys(), allow_code=self._policy.allow_code)
        is_chunked = release.leaves is not None
        # Without chunks a header is as dear as its file: both are done, in quick mode neither.
        headers = {name for name in readable if is_chunked or not (self._options.quick and is_weights(name))}
        weights = check_weights(names, files, headers, self._jobs)
        problems += weights.problems
        if LEDGER_NAME in readable:
            problems += check_ledger(files, weights.tensors, [name for name in names if is_weights(name)])
        for problem in problems:
            self.add(problem)
        failed = {problem.file for problem in problems}
        if is_chunked:
            self._verified_chunks = {name: num_chunks(size) for name, size in weights.header_sizes.items()}
        read = [*weights.indexes, *(name for name in config_names(names) if name in readable)]
        for name in [*read, *(() if is_chunked else weights.tensors)]:
            if name not in failed:
                self._verified[name] = readable[name]

    def _check_content(self, root_fd: int, release: TrustedRelease, readable: Mapping[str, int]) -> None:
        for name in (MANIFEST_NAME, CHUNKS_NAME):
            # Read, checked and used already.
            if name in readable:
                self._verified[name] = readable[name]
        todo = [
            release.signed_file(name, size)
            for name, size in readable.items()
            if name not in self._verified and not (self._options.quick and is_weights(name))
        ]
        chunks = self._verified_chunks
        total = sum(max(0, file.size_bytes - chunks.get(file.name, 0) * CHUNK_SIZE_BYTES) for file in todo)
        done = 0

        def advance(size_bytes: int, name: str) -> None:
            nonlocal done
            done += size_bytes
            if self._progress is not None:
                self._progress(done, total, name)

        report = check_content(root_fd, todo, self._jobs, advance, chunks)
        for problem in report.problems:
            self.add(problem)
        self._verified |= {name: readable[name] for name in report.verified_files}

    def _name_swapped(self, swapped: SwappedFiles, release: TrustedRelease) -> None:
        """Say of files that fail whose bytes they hold, in place of which chunks differ."""
        failed = {f.file for f in self._findings.findings if f.exit_code == ExitCode.CONTENT and f.file is not None}
        for name in sorted(failed & release.digests.keys()):
            problem = swapped.problem(name)
            if problem is not None:
                self._findings.replace(problem)

    def verdict(self, seconds: float) -> Verdict:
        """The outcome."""
        release = self._release
        manifest = release.manifest if release is not None else None
        num_files = len(release.digests) if release is not None else 0
        if not self._findings.findings and not self._options.quick and len(self._verified) != self._num_needed:
            # Whatever let a file slip past every stage: a release is whole only if every needed byte was hashed.
            message = f"{len(self._verified)} of {self._num_needed} files were verified"
            self.add(LayoutError(message, remedy="remove links and special files from the release"))
        exit_code = self._findings.exit_code
        return Verdict(
            is_ok=exit_code == 0,
            exit_code=exit_code,
            findings=tuple(self._findings.findings),
            warnings=tuple(self._warnings),
            identity=manifest.identity if manifest is not None else None,
            counter=manifest.counter if manifest is not None else None,
            root_digest=release.root_digest if release is not None else None,
            key_hints=tuple(key.hint for key in release.signers) if release is not None else (),
            num_files=num_files,
            num_verified_files=len(self._verified),
            verified_bytes=sum(self._verified.values()),
            seconds=seconds,
            is_partial=self._options.quick or self._num_needed < num_files,
        )


def _ranks_by_name(release: TrustedRelease) -> dict[str, tuple[int, ...] | None]:
    """Which ranks need each signed file: as the manifest says, or by name for a release without one."""
    if release.manifest is None:
        return {name: ranks_of(name) for name in release.digests}
    listed = {file.path: file.ranks for file in release.manifest.files}
    return {name: listed.get(name) for name in release.digests}
