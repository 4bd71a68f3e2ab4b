"""The public functions on finished releases: shard, merge."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from memopt.compressor.api import default_workers
from memopt.compressor.checkpoint.small_files import MAX_METADATA_SIZE_BYTES
from memopt.compressor.output_folder import check_output_place
from memopt.compressor.pipeline import RunResult, run_job
from memopt.compressor.progress import ProgressCallback
from memopt.compressor.ranks.layout import LayoutChoice, choose_layouts
from memopt.compressor.ranks.merge_job import MergeJob
from memopt.compressor.ranks.release_job import ReleaseJob
from memopt.compressor.ranks.released import ReadFile, ReleasedPlan
from memopt.compressor.ranks.shard_job import ShardJob
from memopt.errors import MalformedError, UsageError
from memopt.manifests.safetensors_index import INDEX_NAME, MAX_INDEX_SIZE_BYTES
from memopt.manifests.strict_json import read_capped

if TYPE_CHECKING:
    from memopt.manifests.keys import PublicKey
    from memopt.manifests.policy import TrustPolicy


def shard(
    release: str | Path,
    out: str | Path,
    *,
    tensor_parallel: int | None = None,
    expert_parallel: int | None = None,
    layout: LayoutChoice = "both",
    policy: TrustPolicy | str | Path | None = None,
    key: PublicKey | str | Path | bytes | None = None,
    workers: int | None = None,
    progress: ProgressCallback | None = None,
) -> RunResult:
    """Make a release with rank files in folder `out` from the hub files of `release`; nothing is rounded again.

    The same bytes as compressing with those ranks at once. `layout`: "both" or, for rank files alone, "tp". Every
    tensor is compared with the ledger while it streams; with `policy` or `key` the signature on the ledger is checked
    first, as `open_release` does. `out` is unsigned. Resumes an interrupted run of the same call.
    Raises UsageError, AlignmentError (what cannot be cut), ContentError, LayoutError, LedgerError, and as `compress`.
    """
    layouts = choose_layouts(tensor_parallel, expert_parallel, layout)

    def make(released: ReleasedPlan) -> ReleaseJob:
        return ShardJob(released, layouts)

    return _run(release, out, make, policy, key, workers, progress)


def merge(
    release: str | Path,
    out: str | Path,
    *,
    policy: TrustPolicy | str | Path | None = None,
    key: PublicKey | str | Path | bytes | None = None,
    workers: int | None = None,
    progress: ProgressCallback | None = None,
) -> RunResult:
    """The inverse of `shard`: rank files alone are read, and put together to the hub release that they came from.

    Every slice is compared with the ledger, then the whole. Raises as `shard`; LayoutError for ranks that were swapped,
    MissingFileError for a set that is not complete.
    """
    return _run(release, out, MergeJob, policy, key, workers, progress)


def _run(
    release: str | Path,
    out: str | Path,
    make: Callable[[ReleasedPlan], ReleaseJob],
    policy: TrustPolicy | str | Path | None,
    key: PublicKey | str | Path | bytes | None,
    workers: int | None,
    progress: ProgressCallback | None,
) -> RunResult:
    if not str(release) or not str(out):
        raise UsageError(f"the {'release' if not str(release) else 'output'} has no name", remedy="name a folder")
    if workers is not None and workers < 1:
        raise UsageError(f"{workers} workers do nothing", remedy="use 1 or more")
    if not os.path.isdir(release):
        raise UsageError(
            f"there is no release folder {release}", remedy="name a folder; `memopt pull` fetches one from the Hub"
        )
    check_output_place(Path(release), Path(out))
    with _opened(Path(release), policy, key) as opened:
        job = make(ReleasedPlan(Path(release), opened.read, opened.signed_names))
        result = run_job(job, Path(out), workers=default_workers() if workers is None else workers, progress=progress)
    return replace(result, source_root_digest=opened.root_digest)


@dataclass(frozen=True)
class _Opened:
    read: ReadFile
    root_digest: str | None
    signed_names: frozenset[str] | None


@contextmanager
def _opened(
    folder: Path, policy: TrustPolicy | str | Path | None, key: PublicKey | str | Path | bytes | None
) -> Iterator[_Opened]:
    """How small files are read: as they were signed, if somebody is trusted, else as they lie there."""
    if policy is None and key is None:
        yield _Opened(lambda name: _read_plain(folder, name), None, None)
        return
    from memopt.manifests.release import open_release

    with open_release(folder, policy=policy, key=key) as release:
        yield _Opened(release.read_file, release.root_digest, frozenset(release.files_for()))


def _read_plain(folder: Path, name: str) -> bytes:
    is_index = name.endswith(INDEX_NAME)
    return read_capped(folder / name, MAX_INDEX_SIZE_BYTES if is_index else MAX_METADATA_SIZE_BYTES, MalformedError)
