"""The headers of a Hub checkpoint without its weights: enough for `memopt inspect` and `memopt plan`.

Each shard becomes a sparse local file of the true size that holds its safetensors header, so the ordinary reader opens
the folder. A part of a file cannot be compared with the file's digest: what is read this way describes, and the
download before the real work is what proves it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from memopt.compressor.checkpoint.disk_errors import disk_errors
from memopt.compressor.checkpoint.hub_answers import Target
from memopt.compressor.checkpoint.hub_batch import ProgressMeter, run_batch
from memopt.compressor.checkpoint.hub_cache import HubCache, check_file
from memopt.compressor.checkpoint.hub_http import HubClient, RetryPolicy, is_offline
from memopt.compressor.checkpoint.hub_listing import metadata_files, resolve, weight_files
from memopt.compressor.checkpoint.hub_types import (
    HubFile,
    HubListing,
    HubReference,
    HubSnapshot,
    ProgressCallback,
    VerifiedFile,
)
from memopt.errors import NetworkError, OutputError, SourceChangedError, TruncatedError
from memopt.manifests.safetensors_header import LENGTH_SIZE_BYTES, header_length, parse_header

DEFAULT_WORKERS = 8


def download_headers(
    reference: HubReference,
    folder: Path,
    *,
    progress: ProgressCallback | None = None,
    allow_code: bool = False,
    retry: RetryPolicy | None = None,
    workers: int = DEFAULT_WORKERS,
) -> HubSnapshot:
    """Fill `folder` (new or empty) with verified metadata and, of each shard, its header alone; two requests a shard.

    Progress counts the metadata in bytes and each shard, when its header is there, as all of its bytes.

    Raises as `download_snapshot`, and OutputError (the folder has files), HeaderError, TruncatedError,
    LfsPointerError (a shard is no safetensors file), NetworkError in offline mode.
    """
    if is_offline():
        cached = HubCache.of(reference, None).root / "snapshots"
        raise NetworkError(
            f"{reference}: headers come over the network, which HF_HUB_OFFLINE forbids",
            remedy=f"unset HF_HUB_OFFLINE, or name a downloaded folder (below {cached})",
        )
    with disk_errors(f"cannot use {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise OutputError(f"{folder} is not empty", remedy="name a new folder for the headers")
    listing = resolve(reference, retry=retry)
    client = HubClient.from_environment(retry or RetryPolicy())
    metadata = metadata_files(listing, allow_code=allow_code)
    meter = ProgressMeter(progress, metadata)

    def bring_whole(file: HubFile) -> VerifiedFile:
        return _fetch_whole(client, listing, file, folder, meter.ticker("download", file))

    verified = run_batch(bring_whole, metadata, workers, client.stop)
    weights = weight_files(listing, folder)
    meter = ProgressMeter(progress, weights)

    def bring_header(file: HubFile) -> None:
        _fetch_header(client, listing, file, folder)
        meter.ticker("download", file)(file.size_bytes)

    run_batch(bring_header, weights, workers, client.stop)
    return HubSnapshot(listing, folder, metadata + weights, tuple(verified), headers_only=True)


def _fetch_whole(
    client: HubClient, listing: HubListing, file: HubFile, folder: Path, tick: Callable[[int], None]
) -> VerifiedFile:
    path = folder / file.path
    target = Target(listing.reference, listing.commit, file.path)
    with disk_errors(f"{target}: cannot store it"):
        client.fetch_file(target, path, file.size_bytes, tick)
    try:
        return VerifiedFile(path, check_file(path, file, str(listing.reference), lambda _: None))
    except SourceChangedError:
        path.unlink(missing_ok=True)
        raise


def _fetch_header(client: HubClient, listing: HubListing, file: HubFile, folder: Path) -> None:
    target = Target(listing.reference, listing.commit, file.path)
    if file.size_bytes < LENGTH_SIZE_BYTES:
        raise TruncatedError(f"{target} has {file.size_bytes} bytes, too few for a safetensors file")
    prefix = client.fetch_range(target, 0, LENGTH_SIZE_BYTES, file.size_bytes)
    # Refuses a header over the cap before anything of it is requested.
    length = header_length(prefix, file.size_bytes, str(target))
    raw = client.fetch_range(target, LENGTH_SIZE_BYTES, length, file.size_bytes) if length else b""
    parse_header(raw, file.size_bytes, str(target))
    with disk_errors(f"{target}: cannot store its header"), open(folder / file.path, "xb") as out:
        out.write(prefix + raw)
        out.truncate(file.size_bytes)
