"""Rows 41 to 43 and 54: properly signed releases whose weights are hostile, and releases for one rank."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_releases import SHARDS, flip_byte, sign_anyway, signed_release

from faults.hostile_case import Case
from memopt.manifests.safetensors_index import INDEX_NAME

FIRST, SECOND = SHARDS
Table = dict[str, Any]


def _split(path: Path) -> tuple[bytes, bytes]:
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    return raw[8:end], raw[end:]


def _join(path: Path, header: bytes, data: bytes, length: int | None = None) -> None:
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + data)


def _header(bend: Callable[[Table], Any]) -> Callable[[Path], None]:
    """Sign a first shard with a changed header."""

    def make(folder: Path) -> None:
        header, data = _split(folder / FIRST)
        table = json.loads(header)
        bend(table)
        _join(folder / FIRST, json.dumps(table).encode(), data)
        sign_anyway(folder)

    return make


def _raw_header(bend: Callable[[bytes], bytes], length: int | None = None) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        header, data = _split(folder / FIRST)
        _join(folder / FIRST, bend(header), data, length)
        sign_anyway(folder)

    return make


def _tensor(table: Table, suffix: str) -> Table:
    return table[next(name for name in table if name.endswith(suffix))]


def _overlap(table: Table) -> None:
    """A tensor starts within the one before it, whose size still fits."""
    entry = _tensor(table, ".norm.weight")
    start, end = entry["data_offsets"]
    entry["data_offsets"] = [start - 4, end - 4]


def _same_place(table: Table) -> None:
    table["second.name"] = dict(_tensor(table, ".norm.weight"))


def _hole(table: Table) -> None:
    """The last tensor is left out: its bytes belong to nothing."""
    last = max((name for name in table if name != "__metadata__"), key=lambda name: table[name]["data_offsets"])
    del table[last]


def _entry(suffix: str, **fields: object) -> Callable[[Table], None]:
    return lambda table: _tensor(table, suffix).update(fields)


def _duplicate_name(header: bytes) -> bytes:
    name = next(name for name in json.loads(header) if name.endswith(".norm.weight"))
    entry = json.dumps(json.loads(header)[name]).encode()
    return header.rstrip()[:-1] + b',"' + name.encode() + b'":' + entry + b"}"


def _append(folder: Path) -> None:
    with (folder / FIRST).open("ab") as file:
        file.write(b"\0")
    sign_anyway(folder)


def _content(data: bytes) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / FIRST).write_bytes(data)
        sign_anyway(folder)

    return make


def _index(bend: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    """Sign an index whose weight map was changed."""

    def make(folder: Path) -> None:
        table = json.loads((folder / INDEX_NAME).read_text())
        bend(table["weight_map"])
        (folder / INDEX_NAME).write_text(json.dumps(table))
        sign_anyway(folder)

    return make


def _first_to(shard: str) -> Callable[[Path], None]:
    return _index(lambda weight_map: weight_map.update({min(weight_map): shard}))


def _index_text(bend: Callable[[str], str]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        path = folder / INDEX_NAME
        path.write_text(bend(path.read_text()))
        sign_anyway(folder)

    return make


def _duplicate_index_key(text: str) -> str:
    name = min(json.loads(text)["weight_map"])
    return text.replace('"weight_map": {', f'"weight_map": {{"{name}": "{SECOND}",')


def _linked_shard(folder: Path) -> None:
    """The index names a link, whose target's bytes were signed under the link's name."""
    shutil.copy(folder / SECOND, folder / "model-00003-of-00003.safetensors")
    sign_anyway(folder)
    (folder / "model-00003-of-00003.safetensors").unlink()
    (folder / "model-00003-of-00003.safetensors").symlink_to(SECOND)


def _in_two_shards(folder: Path) -> None:
    tensors = load_file(folder / SECOND)
    name, tensor = next(iter(load_file(folder / FIRST).items()))
    save_file(tensors | {name: tensor}, folder / SECOND, {"format": "pt"})
    sign_anyway(folder)


def _extra_tensor(folder: Path) -> None:
    save_file(load_file(folder / SECOND) | {"backdoor": torch.ones(2)}, folder / SECOND, {"format": "pt"})
    sign_anyway(folder)


def _tensor_gone(folder: Path) -> None:
    tensors = load_file(folder / SECOND)
    tensors.pop(min(tensors))
    save_file(tensors, folder / SECOND, {"format": "pt"})
    sign_anyway(folder)


def _other_shape(folder: Path) -> None:
    """Names agree everywhere, but the ledger has another shape for one tensor."""
    path = folder / "ledger.jsonl"
    first, *others = path.read_text().splitlines()
    row = json.loads(first)
    row["outputs"][0]["shape"] = [1, *row["outputs"][0]["shape"]]
    path.write_text("".join(line + "\n" for line in (json.dumps(row), *others)))
    sign_anyway(folder)


def _bad_ledger(folder: Path) -> None:
    (folder / "ledger.jsonl").write_text('{"outputs": 1}\n')
    sign_anyway(folder)


def _beside(name: str) -> Callable[[Path], None]:
    """Another copy of the weights, signed but in no index."""

    def make(folder: Path) -> None:
        save_file({"other": torch.ones(3)}, folder / name, {"format": "pt"})
        sign_anyway(folder)

    return make


def _no_index(folder: Path) -> None:
    (folder / INDEX_NAME).unlink()
    sign_anyway(folder)


def _second_index(folder: Path) -> None:
    shutil.copy(folder / INDEX_NAME, folder / "consolidated.safetensors.index.json")
    sign_anyway(folder)


def _auto_map(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    sign_anyway(folder)


def _signed_code(folder: Path) -> None:
    (folder / "modeling.py").write_text("import os")
    sign_anyway(folder)


def _only_rank_3(bend: Callable[[Path], Any] | None = None) -> Callable[[Path], Path]:
    """A pod's volume: the small files and those of rank 3 alone."""

    def make(folder: Path) -> Path:
        release = signed_release(folder.parent / "ranks", rows=8, num_ranks=4)
        for path in release.rglob("*.safetensors*"):
            if path.parent != release / "tp4" / "rank-3":
                path.unlink()
        if bend is not None:
            bend(release)
        return release

    return make


_HUGE = 2**62
_MESSAGE = (FIRST,)
_HEADERS: dict[str, Callable[[Path], None]] = {
    "overlap": _header(_overlap),
    "two tensors in one place": _header(_same_place),
    "a hole": _header(_hole),
    "a giant header": _raw_header(lambda header: header, length=2**63),
    "a header above the cap": _raw_header(lambda header: header, length=100_000_001),
    "a header past the end": _raw_header(lambda header: header, length=1_000_000),
    "no header": _raw_header(lambda header: header, length=0),
    "a duplicate name": _raw_header(_duplicate_name),
    "a leading space": _raw_header(lambda header: b" " + header),
    "header not UTF-8": _raw_header(lambda header: header.replace(b"norm", b"nor\xff")),
    "a negative offset": _header(_entry(".norm.weight", data_offsets=[-8, 20])),
    "reversed offsets": _header(_entry(".norm.weight", data_offsets=[40, 12])),
    "offsets past the end": _header(_entry(".norm.weight", data_offsets=[0, _HUGE])),
    "a shape that overflows": _header(_entry(".norm.weight", shape=[_HUGE, _HUGE])),
    "a shape of another size": _header(_entry(".norm.weight", shape=[8])),
    "a shape with a float": _header(_entry(".norm.weight", shape=[7.0])),
    "a type of another size": _header(_entry(".norm.weight", dtype="F64")),
    "a further field": _header(_entry(".norm.weight", further=1)),
    "metadata that is no text": _header(lambda table: table.update(__metadata__={"a": [1]})),
    "trailing bytes": _append,
    "no bytes": _content(b""),
    "five bytes": _content(b"\1\0\0\0\0"),
    "an HTML page": _content(b"<!DOCTYPE html><html>Not found</html>"),
    "an LFS pointer": _content(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"),
}
_INDEX_FAULTS = (
    "../model.safetensors",
    "/etc/model.safetensors",
    "a/b.safetensors",
    "a\\b.safetensors",
    "",
    "config.json",
)

CASES = (
    *(Case(41, name, 8, make, _MESSAGE) for name, make in _HEADERS.items()),
    Case(41, "an unknown type", 9, _header(_entry(".norm.weight", dtype="F4")), _MESSAGE),
    *(Case(42, f"shard {shard!r}", 8, _first_to(shard), (INDEX_NAME,)) for shard in _INDEX_FAULTS),
    Case(42, "a shard that nobody signed", 6, _first_to("model-00009-of-00009.safetensors"), ("00009-of-00009",)),
    Case(42, "a shard that is a link", 6, _linked_shard, ("model-00003-of-00003.safetensors", "symbolic link")),
    Case(42, "a tensor of another shard", 6, _first_to(SECOND), (INDEX_NAME.split(".")[0],)),
    Case(42, "a tensor in two shards", 6, _in_two_shards, (SECOND,)),
    Case(42, "a tensor that is in no shard", 6, _tensor_gone, (SECOND,)),
    Case(42, "a tensor that is not in the index", 6, _extra_tensor, (SECOND, "backdoor")),
    Case(42, "a tensor more in the index", 6, _index(lambda m: m.update({"model.more": FIRST})), (FIRST, "model.more")),
    Case(42, "duplicate names in the index", 8, _index_text(_duplicate_index_key), (INDEX_NAME, "twice")),
    Case(42, "an empty index", 8, _index(lambda weight_map: weight_map.clear()), (INDEX_NAME,)),
    Case(42, "an index that is no JSON", 8, _index_text(lambda text: text[:-3]), (INDEX_NAME,)),
    Case(42, "a shape that differs from the ledger", 6, _other_shape, ("ledger.jsonl",)),
    Case(42, "a malformed ledger", 8, _bad_ledger, ("ledger.jsonl",)),
    Case(43, "a consolidated copy", 6, _beside("consolidated.safetensors"), ("consolidated.safetensors",)),
    Case(43, "a stale shard", 6, _beside("model-00003-of-00003.safetensors"), ("model-00003-of-00003.safetensors",)),
    Case(43, "a single file beside shards", 6, _beside("model.safetensors"), ("model.safetensors",)),
    Case(43, "shards without an index", 6, _no_index, (SECOND,)),
    Case(43, "a second index", 6, _second_index, ("consolidated.safetensors.index.json",)),
    # Not in the table, but asked for with it: code that a release brings.
    Case(43, "auto_map", 5, _auto_map, ("config.json", "auto_map")),
    Case(43, "signed code", 5, _signed_code, ("modeling.py",)),
    Case(54, "only rank 3 is there", 0, _only_rank_3(), ("PARTIAL",), rank=3),
    Case(54, "an unlisted file", 6, _only_rank_3(lambda f: (f / "x.py").write_text("")), ("x.py",), rank=3),
    Case(54, "an unlisted file of the rank", 6, _only_rank_3(lambda f: (f / "tp4/rank-3/x").touch()), ("x",), rank=3),
    Case(54, "a flipped bit", 4, _only_rank_3(lambda f: flip_byte(f / "tp4/rank-3" / FIRST, -1)), (FIRST,), rank=3),
    Case(54, "a missing shard", 6, _only_rank_3(lambda f: (f / "tp4/rank-3" / FIRST).unlink()), (FIRST,), rank=3),
    Case(54, "all ranks wanted", 6, _only_rank_3(), (FIRST, "not there")),
    Case(54, "a rank that there is not", 2, _only_rank_3(), ("rank 4",), rank=4),
)
