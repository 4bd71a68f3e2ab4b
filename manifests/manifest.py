"""memopt.manifest.json: the identity of a release and every file of it, as canonical JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from memopt.errors import ManifestError
from memopt.manifests.digest import CHUNK_SIZE_BYTES, is_hex_digest
from memopt.manifests.file_names import check_file_name, first_collision
from memopt.manifests.strict_json import parse_json_object

MANIFEST_FORMAT = "memopt.manifest/1"
MAX_MANIFEST_SIZE_BYTES = 64 * 2**20
MAX_FILES = 1_000_000
MAX_FILE_SIZE_BYTES = 2**53 - 1
ROLES = ("weights", "index", "config", "tokenizer", "template", "ledger", "chunks", "quality", "code", "other")


@dataclass(frozen=True)
class ManifestFile:
    """One file. `ranks`: the ranks that need it, None for all. `chunk_root`: see digest.py, hex."""

    path: str
    size_bytes: int
    sha256: str
    role: str
    ranks: tuple[int, ...] | None
    chunk_root: str


@dataclass(frozen=True)
class Manifest:
    """A release's signed description. `created`, `not_after`: seconds since 1970; `counter` rises with every release.

    `previous_digest`: SHA-256 of the previous release's manifest file. `source_digest`, `recipe_digest`: SHA-256 (hex)
    of release.json's source and recipe tables in canonical JSON. `tools`: name -> version.
    """

    identity: str
    family: str
    counter: int
    created: int
    not_after: int | None
    previous_digest: str | None
    source_digest: str
    recipe_digest: str
    tools: dict[str, str]
    files: tuple[ManifestFile, ...]
    chunk_size_bytes: int = CHUNK_SIZE_BYTES
    format: str = MANIFEST_FORMAT

    def file(self, path: str) -> ManifestFile | None:
        """The entry of `path`."""
        return next((entry for entry in self.files if entry.path == path), None)


def canonical_json(value: Any) -> bytes:
    """RFC 8785 for the JSON that memopt writes: sorted keys, no spaces, UTF-8; strings, integers, booleans, null."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def render_manifest(manifest: Manifest) -> bytes:
    """The manifest file's bytes; files sorted by path."""
    table = asdict(manifest)
    table["files"] = sorted(table["files"], key=lambda entry: entry["path"])
    return canonical_json(table)


def _refuse(message: str) -> ManifestError:
    return ManifestError(message, file="memopt.manifest.json", remedy="fetch the release again")


def _require(table: dict[str, Any], name: str, kinds: type | tuple[type, ...]) -> Any:
    value = table.get(name)
    kinds_tuple = kinds if isinstance(kinds, tuple) else (kinds,)
    if isinstance(value, bool) or not isinstance(value, kinds_tuple):
        raise _refuse(f"{name} is {value!r:.80}")
    return value


def _parse_file(entry: Any) -> ManifestFile:
    if not isinstance(entry, dict) or set(entry) != set(ManifestFile.__dataclass_fields__):
        raise _refuse("a file entry must have exactly path, size_bytes, sha256, role, ranks and chunk_root")
    path = _require(entry, "path", str)
    check_file_name(path)
    size_bytes = _require(entry, "size_bytes", int)
    if not 0 <= size_bytes <= MAX_FILE_SIZE_BYTES:
        raise _refuse(f"{path}: size {size_bytes}")
    if not is_hex_digest(entry["sha256"]) or not is_hex_digest(entry["chunk_root"]):
        raise _refuse(f"{path}: digests must be 64 lower-case hex digits")
    if entry["role"] not in ROLES:
        raise _refuse(f"{path}: role {entry['role']!r:.80} is unknown")
    ranks = entry["ranks"]
    if ranks is not None:
        is_sound = isinstance(ranks, list) and ranks and all(type(rank) is int and 0 <= rank < 4096 for rank in ranks)
        if not is_sound or sorted(set(ranks)) != ranks:
            raise _refuse(f"{path}: ranks must be a rising list of small numbers")
    return ManifestFile(
        path, size_bytes, entry["sha256"], entry["role"], None if ranks is None else tuple(ranks), entry["chunk_root"]
    )


def parse_manifest(raw: bytes) -> Manifest:
    """Parse manifest bytes whose digest was signed; ManifestError or FileNameError for anything out of form."""
    table = parse_json_object(raw, "memopt.manifest.json", ManifestError)
    if table.get("format") != MANIFEST_FORMAT:
        raise _refuse(f"format is {table.get('format')!r:.80}, this version reads {MANIFEST_FORMAT}")
    if set(table) != set(Manifest.__dataclass_fields__):
        raise _refuse(f"fields differ from the format: {sorted(set(table) ^ set(Manifest.__dataclass_fields__))}")
    files = _require(table, "files", list)
    if not 0 < len(files) <= MAX_FILES:
        raise _refuse(f"{len(files)} files")
    entries = tuple(_parse_file(entry) for entry in files)
    collision = first_collision(entry.path for entry in entries)
    if collision is not None:
        raise _refuse(f"{collision[0]!r} and {collision[1]!r} are one file on some systems")
    for name in ("previous_digest",):
        if table[name] is not None and not is_hex_digest(table[name]):
            raise _refuse(f"{name} must be 64 lower-case hex digits")
    for name in ("source_digest", "recipe_digest"):
        if not is_hex_digest(table[name]):
            raise _refuse(f"{name} must be 64 lower-case hex digits")
    tools = _require(table, "tools", dict)
    if not all(isinstance(version, str) for version in tools.values()):
        raise _refuse("tools must map names to versions")
    not_after = table["not_after"]
    for name in ("counter", "created") if not_after is None else ("counter", "created", "not_after"):
        if not 0 <= _require(table, name, int) <= MAX_FILE_SIZE_BYTES:
            raise _refuse(f"{name} is {table[name]}")
    if _require(table, "chunk_size_bytes", int) != CHUNK_SIZE_BYTES:
        raise _refuse(f"chunk_size_bytes is {table['chunk_size_bytes']}, this version reads {CHUNK_SIZE_BYTES}")
    return Manifest(
        identity=_require(table, "identity", str),
        family=_require(table, "family", str),
        counter=table["counter"],
        created=table["created"],
        not_after=not_after,
        previous_digest=table["previous_digest"],
        source_digest=table["source_digest"],
        recipe_digest=table["recipe_digest"],
        tools=tools,
        files=entries,
    )
