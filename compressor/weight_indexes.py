"""model.safetensors.index.json of every folder of weights: the hub's at the top, and each rank's."""

from __future__ import annotations

from collections.abc import Iterable

from memopt.compressor.units import PlannedFile, Unit
from memopt.manifests.rank_folders import RankFolder, RankLayout
from memopt.manifests.safetensors_index import INDEX_NAME, render_index


def hub_index(units: Iterable[Unit]) -> bytes:
    """The bytes of the hub files' index."""
    units = tuple(units)
    weight_map = {header.name: unit.file_name for unit in units for header in unit.layout}
    return render_index(weight_map, sum(unit.data_size_bytes for unit in units))


def rank_indexes(units: Iterable[Unit], ranks: RankLayout | None) -> dict[str, bytes]:
    """Name below the release -> bytes of each rank's index; {} without ranks, none for a rank that holds nothing.

    The bytes of equal indexes are one object: a large model's have 20 MB, and tensor-parallel ranks share theirs.
    """
    if ranks is None:
        return {}
    by_rank: list[list[tuple[Unit, PlannedFile]]] = [[] for _ in range(ranks.num_ranks)]
    for unit in units:
        for file in unit.rank_files:
            by_rank[file.rank or 0].append((unit, file))
    indexes: dict[str, bytes] = {}
    rendered: dict[tuple[tuple[int, int], ...], bytes] = {}
    for rank, files in enumerate(by_rank):
        if not files:
            continue
        # Ranks that hold the same tensors share their layouts, each one object.
        key = tuple((unit.number, id(file.placed)) for unit, file in files)
        if key not in rendered:
            weight_map = {header.name: unit.file_name for unit, file in files for header in file.layout}
            rendered[key] = render_index(weight_map, sum(file.data_size_bytes for _, file in files))
        indexes[RankFolder(ranks, rank).path + INDEX_NAME] = rendered[key]
    return indexes
