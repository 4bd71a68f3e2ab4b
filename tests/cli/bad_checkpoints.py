"""Ways to spoil a checkpoint folder, and what `memopt` must say about each: code, exit code, words."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

Spoil = Callable[[Path], None]
FIRST = "model-00001-of-000002.safetensors"
SECOND = "model-00002-of-000002.safetensors"
INDEX = "model.safetensors.index.json"
LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


@dataclass(frozen=True)
class BadCheckpoint:
    """`spoil` is done to a good folder; then every command must end with `code`, `exit_code` and all of `words`."""

    name: str
    spoil: Spoil
    code: str
    exit_code: int
    words: tuple[str, ...]


def _bytes(name: str, change: Callable[[bytes], bytes]) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return spoil


def _config(**changes: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    return spoil


def _index(change: Callable[[dict[str, str]], object]) -> Spoil:
    def spoil(folder: Path) -> None:
        table = json.loads((folder / INDEX).read_text())
        change(table["weight_map"])
        (folder / INDEX).write_text(json.dumps(table))

    return spoil


def _tensors(change: Callable[[dict[str, Any]], object]) -> Spoil:
    """Write the first file again with other tensors, and the index to match."""

    def spoil(folder: Path) -> None:
        with safe_open(folder / FIRST, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
        change(tensors)
        save_file(tensors, folder / FIRST, metadata={"format": "pt"})
        table = json.loads((folder / INDEX).read_text())
        others = {name: file for name, file in table["weight_map"].items() if file != FIRST}
        table["weight_map"] = others | dict.fromkeys(tensors, FIRST)
        (folder / INDEX).write_text(json.dumps(table))

    return spoil


def _remove(name: str) -> Spoil:
    return lambda folder: (folder / name).unlink()


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def _fifo(folder: Path) -> None:
    (folder / FIRST).unlink()
    os.mkfifo(folder / FIRST)


def _folder_as_file(folder: Path) -> None:
    (folder / FIRST).unlink()
    (folder / FIRST).mkdir()


def _link_loop(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")


def _orphan_scale(tensors: dict[str, Any]) -> None:
    name = next(name for name in tensors if name.endswith("weight_scale_inv"))
    del tensors[name.removesuffix("_scale_inv")]


def _lost_scale(tensors: dict[str, Any]) -> None:
    del tensors[next(name for name in tensors if name.endswith("weight_scale_inv"))]


def _wrong_scale(tensors: dict[str, Any]) -> None:
    name = next(name for name in tensors if name.endswith("weight_scale_inv"))
    tensors[name] = tensors[name].repeat(3, 1)


def _unknown(tensors: dict[str, Any]) -> None:
    tensors["model.layers.0.mystery.weight"] = tensors["model.embed_tokens.weight"].clone()


def _hostile(tensors: dict[str, Any]) -> None:
    tensors["model.\x1b[2J\n[/red]\u202e.weight"] = tensors["model.embed_tokens.weight"].clone()


BAD_CHECKPOINTS = (
    BadCheckpoint("empty folder", _empty, "MEMOPT_MISSING_FILE", 6, ("config.json",)),
    BadCheckpoint("no folder", shutil.rmtree, "MEMOPT_USAGE", 2, ("there is no checkpoint folder",)),
    BadCheckpoint("no config", _remove("config.json"), "MEMOPT_MISSING_FILE", 6, ("config.json",)),
    BadCheckpoint("no index", _remove(INDEX), "MEMOPT_MISSING_FILE", 6, (INDEX,)),
    BadCheckpoint("missing shard", _remove(SECOND), "MEMOPT_MISSING_FILE", 6, (SECOND,)),
    BadCheckpoint(
        "half a shard",
        _bytes(SECOND, lambda raw: raw[: len(raw) // 2]),
        "MEMOPT_TRUNCATED",
        8,
        (SECOND, "half-written"),
    ),
    BadCheckpoint("half a header", _bytes(FIRST, lambda raw: raw[:100]), "MEMOPT_TRUNCATED", 8, (FIRST,)),
    BadCheckpoint("empty shard", _bytes(FIRST, lambda raw: b""), "MEMOPT_TRUNCATED", 8, (FIRST, "0 bytes")),
    BadCheckpoint(
        "trailing byte", _bytes(FIRST, lambda raw: raw + b"\0"), "MEMOPT_HEADER", 8, (FIRST, "1 bytes after")
    ),
    BadCheckpoint(
        "LFS pointer", _bytes(FIRST, lambda raw: LFS_POINTER), "MEMOPT_LFS_POINTER", 8, (FIRST, "git lfs pull")
    ),
    BadCheckpoint("not safetensors", _bytes(FIRST, lambda raw: b"\x80\x04" + raw), "MEMOPT_HEADER", 8, (FIRST,)),
    BadCheckpoint(
        "giant header", _bytes(FIRST, lambda raw: b"\xff" * 8 + raw[8:]), "MEMOPT_HEADER", 8, (FIRST, "claims a header")
    ),
    BadCheckpoint("shard is a pipe", _fifo, "MEMOPT_LAYOUT", 6, (FIRST, "is not a regular file")),
    BadCheckpoint("shard is a folder", _folder_as_file, "MEMOPT_LAYOUT", 6, (FIRST, "is not a regular file")),
    BadCheckpoint("config is a loop", _link_loop, "MEMOPT_LAYOUT", 6, ("config.json",)),
    BadCheckpoint(
        "config is not JSON", _bytes("config.json", lambda raw: raw[:-2]), "MEMOPT_CONFIG", 8, ("config.json",)
    ),
    BadCheckpoint(
        "config twice a key",
        _bytes("config.json", lambda raw: raw.replace(b"{", b'{"a": 1, "a": 2,', 1)),
        "MEMOPT_CONFIG",
        8,
        ("'a' appears twice",),
    ),
    BadCheckpoint(
        "config in UTF-16",
        _bytes("config.json", lambda raw: raw.decode().encode("utf-16")),
        "MEMOPT_CONFIG",
        8,
        ("config.json",),
    ),
    BadCheckpoint("no model type", _config(model_type=None), "MEMOPT_CONFIG", 8, ("model_type is missing",)),
    BadCheckpoint(
        "unsupported model",
        _config(model_type="llama"),
        "MEMOPT_UNSUPPORTED",
        9,
        ("'llama'", "glm_moe_dsa", "kimi_k25", "deepseek_v3"),
    ),
    BadCheckpoint("size missing", _config(hidden_size=None), "MEMOPT_CONFIG", 8, ("hidden_size",)),
    BadCheckpoint("size is text", _config(hidden_size="big"), "MEMOPT_CONFIG", 8, ("hidden_size",)),
    BadCheckpoint("other sizes", _config(moe_intermediate_size=64), "MEMOPT_SHAPE", 8, ("experts", "(64, 128)")),
    BadCheckpoint("more layers", _config(num_hidden_layers=3), "MEMOPT_MISSING_TENSOR", 6, ("model.layers.3",)),
    BadCheckpoint("index is not JSON", _bytes(INDEX, lambda raw: raw[:-2]), "MEMOPT_INDEX", 8, (INDEX,)),
    BadCheckpoint(
        "index leaves the folder",
        _index(lambda m: m.update({"model.norm.weight": "../x.safetensors"})),
        "MEMOPT_INDEX",
        8,
        ("../x.safetensors",),
    ),
    BadCheckpoint("index is empty", _index(dict.clear), "MEMOPT_INDEX", 8, ("weight_map",)),
    BadCheckpoint(
        "index knows more",
        _index(lambda m: m.update({"ghost.weight": FIRST})),
        "MEMOPT_MISSING_TENSOR",
        6,
        ("ghost.weight",),
    ),
    BadCheckpoint(
        "index knows less", _index(lambda m: m.pop("model.norm.weight")), "MEMOPT_INDEX", 8, ("model.norm.weight",)
    ),
    BadCheckpoint(
        "unlisted shard",
        lambda f: shutil.copy(f / FIRST, f / "extra.safetensors"),
        "MEMOPT_LAYOUT",
        6,
        ("extra.safetensors",),
    ),
    BadCheckpoint(
        "scale without weight", _tensors(_orphan_scale), "MEMOPT_MISSING_TENSOR", 6, ("a scale without its weight",)
    ),
    BadCheckpoint(
        "weight without scale", _tensors(_lost_scale), "MEMOPT_MISSING_TENSOR", 6, ("weight without its scale",)
    ),
    BadCheckpoint("scale of another shape", _tensors(_wrong_scale), "MEMOPT_SHAPE", 8, ("scale grid",)),
    BadCheckpoint("unknown tensor", _tensors(_unknown), "MEMOPT_UNKNOWN_TENSOR", 6, ("model.layers.0.mystery.weight",)),
    BadCheckpoint("hostile name", _tensors(_hostile), "MEMOPT_UNKNOWN_TENSOR", 6, (r"\x1b[2J [/red]\u202e.weight",)),
)
