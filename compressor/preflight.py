"""What can be refused before a Hub repository's weights are fetched: everything but the weights themselves."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from memopt.compressor.checkpoint.checkpoint import Checkpoint, raise_first, scan_checkpoint
from memopt.compressor.checkpoint.hub import HubListing, HubReference
from memopt.compressor.checkpoint.hub_cache import HubCache
from memopt.compressor.checkpoint.hub_http import is_offline
from memopt.compressor.compress_job import planned_sizes
from memopt.compressor.fingerprint import plan_fingerprint, run_fingerprint
from memopt.compressor.output_folder import FinishedIdentity, check_output_place, is_complete
from memopt.compressor.plan import Plan
from memopt.compressor.source import hub_headers, hub_identity
from memopt.compressor.source_identity import SourceIdentity
from memopt.compressor.workspace import Workspace, release_file_names
from memopt.errors import DiskFullError, SourceChangedError

PlanMaker = Callable[[Checkpoint, SourceIdentity], Plan]


@dataclass(frozen=True)
class Preflight:
    """What the headers said: the plan's fingerprint, and the listing of the commit that it is for.

    `keep_free_bytes`: what the release will need on the disk that the download goes to.
    """

    fingerprint: str
    listing: HubListing
    keep_free_bytes: int

    def require_same(self, plan: Plan) -> None:
        """SourceChangedError unless the plan from the whole, verified files is the one from the headers."""
        if plan_fingerprint(plan) != self.fingerprint:
            raise SourceChangedError(
                f"{self.listing.reference}: the headers that came first are not those of the verified files",
                remedy="run the same command again; if it persists do not trust this server",
            )


def check_before_download(
    reference: HubReference, out: Path, make_plan: PlanMaker, *, allow_code: bool
) -> Preflight | None:
    """Plan from headers and look at `out`; None in offline mode, where the weights are here already or never come.

    Raises what `build_plan` raises, and OutputError, DiskFullError for `out`.
    """
    cache = HubCache.of(reference, None)
    check_output_place(cache.root, out)
    if is_offline():
        return None
    with hub_headers(reference, allow_code=allow_code) as snapshot:
        scan = scan_checkpoint(snapshot.folder, snapshot.listing.top)
        raise_first(scan.problems)
        plan = make_plan(scan.checkpoint, hub_identity(snapshot))
    needed = _check_output(plan, out)
    return Preflight(plan_fingerprint(plan), snapshot.listing, needed if cache.shares_disk_with(out) else 0)


def _check_output(plan: Plan, out: Path) -> int:
    """The bytes that are still to be written to `out`; OutputError, DiskFullError."""
    fingerprint, layouts = plan_fingerprint(plan), plan.layouts.names
    if is_complete(out, FinishedIdentity(fingerprint, layouts)):
        return 0
    names = release_file_names(plan.units, tuple(file.name for file in plan.small_files))
    with Workspace(out, run_fingerprint(fingerprint, layouts), names):
        needed = sum(size for name, size in planned_sizes(plan).items() if _size_of(out / name) != size)
        free = shutil.disk_usage(out).free
    if needed > free:
        raise DiskFullError(
            f"{needed:,} bytes are to be written, {free:,} are free",
            file=str(out),
            remedy="free some space and run the same command again",
        )
    return needed


def _size_of(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None
