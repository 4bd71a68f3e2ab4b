"""Which files a Hub repository has at one commit, and which of them memopt needs. Names from the server are hostile."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from memopt.compressor.checkpoint.disk_errors import RUN_AGAIN
from memopt.compressor.checkpoint.hub_cache import HubCache, cached_listing
from memopt.compressor.checkpoint.hub_http import HubClient, RetryPolicy, is_offline
from memopt.compressor.checkpoint.hub_types import HubFile, HubListing, HubReference
from memopt.compressor.checkpoint.model_config import CONFIG_NAME
from memopt.compressor.checkpoint.small_files import sort_small_files
from memopt.errors import IndexFileError, MalformedError, MissingFileError, SourceChangedError, UnsupportedError
from memopt.manifests.safetensors_index import (
    INDEX_NAME,
    MAX_INDEX_SIZE_BYTES,
    SINGLE_FILE_NAME,
    is_plain_file_name,
    parse_index,
)
from memopt.manifests.strict_json import parse_json_object, read_capped

# A repository of 10,000 files has a listing of about 4 MB.
MAX_LISTING_SIZE_BYTES = 64 * 2**20
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def _leaves_its_folder(path: str) -> bool:
    # Git itself cannot store such a path, so a server that lists one lies.
    return path.startswith("/") or any(part in {"", ".", ".."} for part in path.split("/")) or "\0" in path


def _parse_path(entry: Any, reference: HubReference) -> str:
    where = f"the Hub's listing of {reference}"
    path = entry.get("rfilename") if isinstance(entry, dict) else None
    if not isinstance(path, str):
        raise MalformedError(f"{where} has an entry without a file name", remedy="check HF_ENDPOINT")
    if _leaves_its_folder(path):
        raise MalformedError(f"{where} names {path!r}, which leaves the folder", remedy="do not trust this server")
    return path


def _parse_file(path: str, entry: dict[str, Any], reference: HubReference) -> HubFile:
    where = f"the Hub's listing of {reference}"
    lfs = entry.get("lfs")
    sha256 = lfs.get("sha256") if isinstance(lfs, dict) else None
    size = lfs.get("size") if isinstance(lfs, dict) else entry.get("size")
    blob_id = entry.get("blobId") or ""
    valid_sha256 = isinstance(sha256, str) and _SHA256.fullmatch(sha256) is not None if lfs else True
    valid_blob_id = isinstance(blob_id, str) and (_COMMIT.fullmatch(blob_id) is not None or (bool(lfs) and not blob_id))
    # The digests become names in the cache, so their form is checked here.
    valid_digests = valid_sha256 and valid_blob_id
    if not valid_digests or not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 2**63:
        raise MalformedError(f"{where} gives no valid size and digest for {path}", remedy="check HF_ENDPOINT")
    return HubFile(path, size, sha256, blob_id)


def parse_listing(raw: bytes, reference: HubReference, *, every_file: bool = False) -> HubListing:
    """The listing in the Hub's JSON; MalformedError for anything odd, SourceChangedError for another commit.

    `every_file`: with the files in subfolders and those with odd names, whose names the caller must check.
    """
    table = parse_json_object(raw, f"the Hub's listing of {reference}", MalformedError)
    commit, siblings = table.get("sha"), table.get("siblings")
    if not isinstance(commit, str) or _COMMIT.fullmatch(commit) is None or not isinstance(siblings, list):
        raise MalformedError(f"the Hub's listing of {reference} has no commit or no files", remedy="check HF_ENDPOINT")
    if _COMMIT.fullmatch(reference.revision) and commit != reference.revision:
        raise SourceChangedError(f"asked for {reference}, the server answered with commit {commit}")
    paths = [_parse_path(entry, reference) for entry in siblings]
    # No checkpoint needs a file in a subfolder or with an odd name.
    usable = [every_file or (is_plain_file_name(path) and path.isprintable()) for path in paths]
    rows = zip(paths, siblings, usable, strict=True)
    files = [_parse_file(path, entry, reference) for path, entry, is_usable in rows if is_usable]
    passed_over = tuple(sorted({path for path, is_usable in zip(paths, usable, strict=True) if not is_usable}))
    if len({file.path for file in files}) != len(files):
        raise MalformedError(f"the Hub's listing of {reference} names a file twice", remedy="check HF_ENDPOINT")
    in_order = tuple(sorted(files, key=lambda file: file.path))
    return HubListing(reference, commit, in_order, passed_over=passed_over)


def resolve(reference: HubReference, *, cache_dir: Path | None = None, retry: RetryPolicy | None = None) -> HubListing:
    """The commit that `reference` means now and its files, by one request.

    In offline mode: what an earlier call was told of the commit in the cache, else what the cache holds of it.

    Raises UsageError (no such repository or revision, no access), NetworkError, MalformedError, SourceChangedError.
    """
    if is_offline():
        return _saved_listing(cached_listing(reference, cache_dir), HubCache.of(reference, cache_dir))
    client = HubClient.from_environment(retry or RetryPolicy())
    return parse_listing(client.fetch_listing(reference, MAX_LISTING_SIZE_BYTES), reference)


def _saved_listing(found: HubListing, cache: HubCache) -> HubListing:
    path = cache.listing(found.commit)
    if not path.exists():
        return found
    raw = read_capped(path, MAX_LISTING_SIZE_BYTES, MalformedError)
    listing = parse_listing(raw, replace(found.reference, revision=found.commit))
    return replace(listing, reference=found.reference, from_cache=True)


def render_listing(listing: HubListing) -> bytes:
    """The listing in the Hub's JSON: `parse_listing` gives it back."""
    siblings: list[dict[str, Any]] = [{"rfilename": path} for path in listing.passed_over]
    for file in listing.files:
        lfs = {"sha256": file.sha256, "size": file.size_bytes} if file.sha256 is not None else None
        siblings.append({"rfilename": file.path, "size": file.size_bytes, "blobId": file.blob_id, "lfs": lfs})
    return json.dumps({"sha": listing.commit, "siblings": siblings}).encode()


def metadata_files(listing: HubListing, *, allow_code: bool) -> tuple[HubFile, ...]:
    """config.json, the index and what a release copies (small_files.py); MissingFileError without a config.json."""
    require(listing, CONFIG_NAME)
    index = listing.find(INDEX_NAME)
    if index is not None and index.size_bytes > MAX_INDEX_SIZE_BYTES:
        raise IndexFileError(
            f"{listing.reference}: {index.size_bytes:,} bytes, at most {MAX_INDEX_SIZE_BYTES:,} are read",
            file=INDEX_NAME,
        )
    copied, _ = sort_small_files(listing.top, weights=(), allow_code=allow_code)
    names = {CONFIG_NAME, INDEX_NAME, *(file.name for file in copied)}
    return tuple(file for file in listing.files if file.path in names)


def weight_files(listing: HubListing, folder: Path) -> tuple[HubFile, ...]:
    """The weight files that the index in `folder` names, or model.safetensors where there is no index.

    Raises IndexFileError (a name that leaves the folder), MissingFileError, UnsupportedError (no safetensors).
    """
    if listing.find(INDEX_NAME) is not None:
        index = parse_index(read_capped(folder / INDEX_NAME, MAX_INDEX_SIZE_BYTES, IndexFileError))
        return tuple(require(listing, name) for name in index.file_names)
    if listing.find(SINGLE_FILE_NAME) is None and not listing.from_cache:
        raise UnsupportedError(
            f"{listing.reference} has neither {INDEX_NAME} nor {SINGLE_FILE_NAME}",
            remedy="only safetensors checkpoints are read: name a repository that has one",
        )
    return (require(listing, SINGLE_FILE_NAME),)


def require(listing: HubListing, name: str) -> HubFile:
    """The listed file called `name`; MissingFileError if there is none."""
    file = listing.find(name)
    if file is not None:
        return file
    if listing.from_cache:
        raise MissingFileError(
            f"{listing.reference}: {name} of commit {listing.commit} is not in the cache, and HF_HUB_OFFLINE is set",
            remedy=f"unset HF_HUB_OFFLINE and {RUN_AGAIN}",
        )
    raise MissingFileError(
        f"{listing.reference} has no {name} at commit {listing.commit}", remedy="name another repository or revision"
    )
