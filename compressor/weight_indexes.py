"""model.safetensors.index.json of every folder of weights: the hub's at the top, and each rank's."""

from __future__ import annotations

from collections.abc import Iterable

from memopt.compressor.units import Unit
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
    maps: list[dict[str, str]] = [{} for _ in range(ranks.num_ranks)]
    sizes = [0] * ranks.num_ranks
    for unit in units:
        for file in unit.rank_files:
            rank = file.rank or 0
            maps[rank] |= dict.fromkeys((header.name for header in file.layout), unit.file_name)
            sizes[rank] += file.data_size_bytes
    indexes: dict[str, bytes] = {}
    last = b""
    for rank, weight_map in enumerate(maps):
        if not weight_map:
            continue
        if rank == 0 or (weight_map, sizes[rank]) != (maps[rank - 1], sizes[rank - 1]):
            last = render_index(weight_map, sizes[rank])
        indexes[RankFolder(ranks, rank).path + INDEX_NAME] = last
    return indexes
