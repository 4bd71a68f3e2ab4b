"""Small releases with rank files that their ledger names, made by hand: hub and rank files, or rank files alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny_releases import IDENTITY, SHARDS, shard_tensors, sign, write_index

from memopt.manifests.rank_folders import RankFolder, RankLayout, parse_layout
from memopt.manifests.safetensors_header import TensorHeader, render_header

ROWS = 8
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int32: "I32", torch.int64: "I64"}
_CUTS = {
    "attention.weight": "rows",
    "experts.weight_packed": "columns",
    "experts.weight_scale": "columns",
    "experts.weight_shape": "shape",
}
_AXES = {"rows": 0, "columns": 1}
Row = dict[str, Any]


def layout_of(text: str) -> RankLayout:
    layout = parse_layout(text)
    assert layout is not None
    return layout


def cut_of(name: str, layout: RankLayout) -> str:
    """How a tensor of a tiny release is cut."""
    cut = _CUTS.get(name.split(".", 3)[-1], "replicated")
    return "expert" if layout.kind == "ep" and ".experts." in name else cut


def hub_tensors(number: int) -> dict[str, torch.Tensor]:
    """The tensors of a shard, the widest first; none that would leave the next one unaligned."""
    tensors = shard_tensors(number, ROWS)
    return {
        name: tensors[name] for name in sorted(tensors, key=lambda n: -tensors[n].element_size()) if "fp8" not in name
    }


def rank_tensors(number: int, folder: RankFolder) -> dict[str, torch.Tensor]:
    """What a rank has of a shard: what all ranks have first, then its own experts (those of its shard number)."""
    layout = folder.layout
    common: dict[str, torch.Tensor] = {}
    owned: dict[str, torch.Tensor] = {}
    for name, tensor in hub_tensors(number).items():
        cut = cut_of(name, layout)
        if cut == "expert":
            if folder.rank == number % layout.num_ranks:
                owned[name] = tensor
        elif cut in _AXES:
            common[name] = tensor.chunk(layout.num_ranks, _AXES[cut])[folder.rank].contiguous()
        else:
            common[name] = tensor // torch.tensor([1, layout.num_ranks]) if cut == "shape" else tensor
    return common | owned


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> dict[str, TensorHeader]:
    """A safetensors file with `tensors` in their order; where they lie, by name."""
    headers: dict[str, TensorHeader] = {}
    position = 0
    for name, tensor in tensors.items():
        end = position + tensor.numel() * tensor.element_size()
        headers[name] = TensorHeader(name, _DTYPES[tensor.dtype], tuple(tensor.shape), position, end)
        position = end
    path.write_bytes(render_header(headers.values(), metadata) + b"".join(map(raw_bytes, tensors.values())))
    return headers


def write_rank_release(
    folder: Path, layout_name: str = "tp2", *, has_hub: bool = True, has_metadata: bool = True
) -> Path:
    """An unsigned release in the new `folder`, whose ledger names its rank files; without `has_hub` nothing else."""
    layout = layout_of(layout_name)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "glm_moe_dsa", "hidden_size": 128}))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    rows: list[Row] = []
    for number, file in enumerate(SHARDS):
        hub = hub_tensors(number)
        places = write_tensors(folder / file, hub, {"format": "pt"}) if has_hub else {}
        slices: dict[str, list[torch.Tensor]] = {}
        rank_places: dict[str, TensorHeader] = {}
        for rank in range(layout.num_ranks):
            part = RankFolder(layout, rank)
            (folder / part.path).mkdir(parents=True, exist_ok=True)
            metadata = {"format": "pt"} | (part.metadata if has_metadata else {})
            tensors = rank_tensors(number, part)
            rank_places |= write_tensors(folder / part.path / file, tensors, metadata)
            for name, tensor in tensors.items():
                slices.setdefault(name, []).append(tensor)
        for name, tensor in hub.items():
            place = places.get(name)
            rows.append(
                {
                    "tensor": name,
                    "outputs": [
                        {
                            "name": name,
                            "file": file if has_hub else None,
                            "dtype": _DTYPES[tensor.dtype],
                            "shape": list(tensor.shape),
                            "data_offsets": None if place is None else [place.start, place.end],
                            "sha256": hashlib.sha256(raw_bytes(tensor)).hexdigest(),
                            "ranks": _ranks(layout, number, rank_places[name], slices[name]),
                        }
                    ],
                }
            )
    for path in {folder, *(folder / RankFolder(layout, rank).path for rank in range(layout.num_ranks))}:
        if has_hub or path != folder:
            write_index(path, SHARDS)
    write_rows(folder, rows)
    return folder


def _ranks(layout: RankLayout, number: int, place: TensorHeader, slices: list[torch.Tensor]) -> Row:
    cut = cut_of(place.name, layout)
    digests = [hashlib.sha256(raw_bytes(tensor)).hexdigest() for tensor in slices]
    ranks: Row = {"folder": layout.folder, "cut": cut, "shape": list(place.shape)}
    if cut == "expert":
        ranks["owner"] = number % layout.num_ranks
    ranks["data_offsets"] = [place.start, place.end]
    ranks["sha256"] = digests[:1] if cut in {"replicated", "expert"} else digests
    return ranks


def write_rows(folder: Path, rows: list[Row]) -> None:
    """ledger.jsonl, and the release.json that names it."""
    ledger = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (folder / "ledger.jsonl").write_bytes(ledger)
    release = {
        "identity": {"name": IDENTITY, "family": "glm_moe_dsa"},
        "ledger": {"file": "ledger.jsonl", "sha256": hashlib.sha256(ledger).hexdigest()},
    }
    (folder / "release.json").write_text(json.dumps(release))


def read_rows(folder: Path) -> list[Row]:
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


def bend_ledger(folder: Path, suffix: str, bend: Callable[[Row], Any]) -> None:
    """Change what the ledger says of the first output whose name ends in `suffix`."""
    rows = read_rows(folder)
    bend(next(row["outputs"][0] for row in rows if row["tensor"].endswith(suffix)))
    write_rows(folder, rows)


def signed_rank_release(
    folder: Path, layout_name: str = "tp2", *, has_hub: bool = True, has_metadata: bool = True
) -> Path:
    """Write and sign a release with rank files."""
    return sign(write_rank_release(folder, layout_name, has_hub=has_hub, has_metadata=has_metadata))


def swap(one: Path, other: Path) -> None:
    """Exchange two files."""
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
