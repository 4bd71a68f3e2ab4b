"""model.safetensors.index.json: which file holds which tensor."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from memopt.errors import IndexFileError
from memopt.manifests.strict_json import parse_json_object, read_capped

INDEX_NAME = "model.safetensors.index.json"
SINGLE_FILE_NAME = "model.safetensors"
WEIGHT_SUFFIX = ".safetensors"
MAX_INDEX_SIZE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class SafetensorsIndex:
    """`weight_map`: tensor name -> file name, both as read."""

    weight_map: dict[str, str]

    @property
    def file_names(self) -> tuple[str, ...]:
        return tuple(sorted(set(self.weight_map.values())))


def is_plain_file_name(name: str) -> bool:
    """Whether `name` stays inside its folder on every system: no separators, no dots alone, no control characters."""
    return bool(name) and name not in {".", ".."} and not any(c in "/\\:" or ord(c) < 32 for c in name)


def parse_index(raw: bytes, file: str = INDEX_NAME) -> SafetensorsIndex:
    """Parse index bytes; IndexFileError if malformed or if a shard's name leaves the folder."""
    table = parse_json_object(raw, file, IndexFileError)
    weight_map = table.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise IndexFileError("weight_map must be a table of tensor names", file=file)
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not is_plain_file_name(shard) or not shard.endswith(WEIGHT_SUFFIX):
            raise IndexFileError(
                f"{shard!r} is not a {WEIGHT_SUFFIX} file of this folder",
                tensor=tensor,
                file=file,
                remedy="the index must name files beside it",
            )
    return SafetensorsIndex(weight_map)


def read_index(folder: Path) -> SafetensorsIndex:
    """Read and parse the index of a checkpoint folder."""
    return parse_index(read_capped(folder / INDEX_NAME, MAX_INDEX_SIZE_BYTES, IndexFileError))


def render_index(weight_map: dict[str, str], total_size_bytes: int) -> bytes:
    """Index bytes as huggingface writes them; `total_size_bytes` counts tensor data only."""
    table = {"metadata": {"total_size": total_size_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode()
