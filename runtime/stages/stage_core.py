"""A stage's engine from a signed release: its core, the identity of its model, and where its pages lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from memopt.errors import SourceChangedError, UnsupportedError
from memopt.manifests.keys import PublicKey
from memopt.manifests.policy import TrustPolicy
from memopt.manifests.release import open_release
from memopt.runtime.engine.engine_core import EngineCore
from memopt.runtime.engine.engine_options import EngineOptions
from memopt.runtime.engine.new_core import new_core
from memopt.runtime.engine.verified_model import load_verified
from memopt.runtime.integrity.tagged_tracker import TaggedTracker
from memopt.runtime.integrity.tracker import PageTracker
from memopt.runtime.kv.layer_kv import KvPools
from memopt.runtime.parallel.communicator import SingleRank
from memopt.runtime.stages.model_identity import ModelIdentity, model_identity
from memopt.runtime.stages.shared_region import SharedRegion, new_shared_region
from memopt.runtime.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class StageCore:
    """`region` is None unless it was asked for; its descriptor can be closed once the transport has it."""

    core: EngineCore
    model: ModelIdentity
    tokenizer: TextTokenizer | None
    region: SharedRegion | None = None


def load_stage_core(
    folder: str | Path,
    options: EngineOptions,
    *,
    policy: TrustPolicy | str | Path | None = None,
    key: PublicKey | str | Path | bytes | None = None,
    is_shared: bool = False,
) -> StageCore:
    """Verify and load a release for one stage, as `Engine` does.

    `is_shared`: BF16 pools and page tags in memory that a decode stage on this machine may read; pages are then tagged
    whatever `options.integrity` says. Raises as `Engine`; UnsupportedError for more than one rank.
    """
    if options.tensor_parallel != 1:
        raise UnsupportedError(
            f"a stage of {options.tensor_parallel} ranks",
            remedy="use tensor_parallel=1: pages go from rank to rank only",
        )
    model = load_verified(folder, policy, key, options, SingleRank())
    with open_release(folder, policy=policy, key=key) as release:
        if release.root_digest != model.root_digest:
            raise SourceChangedError("the release was replaced while it was loaded", file=str(folder))
        identity = model_identity(release)
    regions: list[SharedRegion] = []

    def share(pools: KvPools) -> tuple[KvPools, PageTracker]:
        region = new_shared_region(pools)
        regions.append(region)
        return region.pools, TaggedTracker(region.pools.num_pages, "cpu", tags=region.tags)

    core = new_core(model, options, SingleRank(), place=share if is_shared else None)
    return StageCore(core, identity, model.tokenizer, regions[0] if regions else None)
