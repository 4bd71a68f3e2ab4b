"""Where a checkpoint came from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SourceIdentity:
    """Where the source came from: a folder (nothing but its bytes), or a Hub repository at a commit.

    The commit alone, not the branch or tag that led to it: the same commit gives the same release.
    `file_sha256`: the digests that the Hub publishes for its files, checked against what was read.
    """

    kind: str = "folder"
    repository: str | None = None
    commit: str | None = None
    file_sha256: tuple[tuple[str, str], ...] = ()
