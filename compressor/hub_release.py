"""What a Hub repository holds, compared with what a release's signature covers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from memopt.compressor.checkpoint.hub import HubFile, HubListing, HubReference
from memopt.compressor.checkpoint.hub_http import HubClient
from memopt.compressor.checkpoint.hub_listing import MAX_LISTING_SIZE_BYTES, parse_listing
from memopt.compressor.checkpoint.hub_types import HUB_SCHEME, parse_hub_reference
from memopt.errors import (
    ContentError,
    LayoutError,
    MalformedError,
    MemoptError,
    MemoptIOError,
    PolicyError,
    SignatureError,
    UnsupportedError,
    UsageError,
)
from memopt.manifests.verdict import Verdict, first_finding

# The Hub makes this file itself, in every repository, and it says nothing that an engine reads.
HUB_OWN_FILES = frozenset({".gitattributes"})
_MAX_NAMED = 5
_BY_EXIT_CODE: dict[int, type[MemoptError]] = {
    int(error.exit_code): error
    for error in (
        UsageError,
        SignatureError,
        ContentError,
        PolicyError,
        LayoutError,
        MemoptIOError,
        MalformedError,
        UnsupportedError,
    )
}


@dataclass(frozen=True)
class ReleaseFile:
    """A file of a release as it was signed: size in bytes (None where no manifest says it), SHA-256 in hex."""

    path: str
    size_bytes: int | None
    sha256: str


@dataclass(frozen=True)
class Comparison:
    """Names, sorted: on the Hub as signed, with other content, absent, and there although the release lacks them."""

    same: tuple[str, ...]
    different: tuple[str, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]


def repository(text: str) -> HubReference:
    """The repository that an argument names, with or without hf:// and @revision; UsageError if it names none."""
    reference = parse_hub_reference(text if text.startswith(HUB_SCHEME) else HUB_SCHEME + text)
    if reference is None:
        raise UsageError(f"{text!r} does not name a Hub repository", remedy="write org/name or org/name@revision")
    return reference


def list_files(client: HubClient, reference: HubReference) -> HubListing:
    """Every file of the repository at the commit that `reference` means now, by one request.

    Raises UsageError (no such repository, no access), NetworkError, MalformedError, SourceChangedError.
    """
    return parse_listing(client.fetch_listing(reference, MAX_LISTING_SIZE_BYTES), reference, every_file=True)


def list_commit(client: HubClient, reference: HubReference, commit: str) -> HubListing:
    """As `list_files`, at one commit of the same repository."""
    return list_files(client, replace(reference, revision=commit))


def compare(
    listing: HubListing, files: Iterable[ReleaseFile], git_blob_id: Callable[[str], str] | None = None
) -> Comparison:
    """Compare size and digest of every file: SHA-256 in LFS, elsewhere git's SHA-1, which `git_blob_id` gives.

    Without `git_blob_id` a file outside LFS is compared by its size alone.
    """
    remote: Mapping[str, HubFile] = {file.path: file for file in listing.files}
    expected = {file.path: file for file in files}

    def is_same(file: ReleaseFile) -> bool:
        found = remote[file.path]
        if file.size_bytes is not None and found.size_bytes != file.size_bytes:
            return False
        if found.sha256 is not None:
            return found.sha256 == file.sha256
        return git_blob_id is None or found.blob_id == git_blob_id(file.path)

    present = {path: is_same(file) for path, file in expected.items() if path in remote}
    return Comparison(
        same=tuple(sorted(path for path, same in present.items() if same)),
        different=tuple(sorted(path for path, same in present.items() if not same)),
        missing=tuple(sorted(set(expected) - set(remote))),
        extra=tuple(sorted(set(remote) - set(expected) - HUB_OWN_FILES)),
    )


def named(paths: Iterable[str]) -> str:
    """A list of names for a message: the first few, and how many there are."""
    names = list(paths)
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def refused_verdict(verdict: Verdict, what: str) -> MemoptError:
    """The error that says why a release does not verify: the finding that counts most, and how many there are."""
    first = first_finding(verdict)
    if first is None:
        return MemoptError(f"{what} does not verify")
    others = f", and {len(verdict.findings) - 1} more findings" if len(verdict.findings) > 1 else ""
    error = _BY_EXIT_CODE.get(verdict.exit_code, MemoptError)
    where = f"{first.file}: " if first.file and first.file not in first.message else ""
    return error(f"{what} does not verify: {where}{first.message}{others}", file=first.file, remedy=first.remedy)
