"""The small files of a release that come from its source, byte for byte: tokenizer, templates, licence and others."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memopt.compressor.checkpoint.model_config import CONFIG_NAME
from memopt.compressor.checkpoint.small_files import (
    CODE_SUFFIX,
    FOLDER_MARK,
    MAX_METADATA_SIZE_BYTES,
    SkippedFile,
    SourceFile,
    sort_small_files,
)
from memopt.errors import LayoutError, MalformedError
from memopt.manifests.code_check import config_names
from memopt.manifests.strict_json import parse_json_object, read_capped

_AUTO_MAP = "auto_map"


@dataclass(frozen=True)
class MetadataFile:
    """A small output file: its bytes' size and sha256, and where it comes from ("source" or "memopt")."""

    name: str
    size_bytes: int
    sha256: str
    origin: str


@dataclass(frozen=True)
class MetadataSelection:
    """Files to copy as they are, and files left behind."""

    copied: tuple[MetadataFile, ...]
    skipped: tuple[SkippedFile, ...]


def list_folder(folder: Path) -> tuple[SourceFile, ...]:
    """What lies at the top of `folder`; LayoutError for a name that is not UTF-8."""
    files: list[SourceFile] = []
    for path in sorted(folder.iterdir()):
        if not _is_utf8(path.name):
            raise LayoutError(
                f"{path.name!a} in {folder} is not a UTF-8 file name",
                remedy="rename or remove it: release.json lists it",
            )
        if path.is_dir():
            files.append(SourceFile(path.name + FOLDER_MARK, None))
        else:
            files.append(SourceFile(path.name, path.stat().st_size if path.is_file() else None))
    return tuple(files)


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_metadata(path: Path) -> bytes:
    return read_capped(path, MAX_METADATA_SIZE_BYTES, MalformedError)


def select_metadata(
    folder: Path, listed: tuple[SourceFile, ...] | None = None, *, weights: Collection[str] = (), allow_code: bool
) -> MetadataSelection:
    """Sort the small files of a source into copied and skipped; weights, config, index, release files are neither.

    `listed`: what the source holds, where that is known (a Hub repository: its folder in the cache belongs to others
    too, so what else lies there does not count). None: whatever is in `folder`.
    """
    chosen, skipped = sort_small_files(
        list_folder(folder) if listed is None else listed, weights=weights, allow_code=allow_code
    )
    copied: list[MetadataFile] = []
    for file in chosen:
        raw = read_metadata(folder / file.name)
        copied.append(MetadataFile(file.name, len(raw), hashlib.sha256(raw).hexdigest(), "source"))
    return MetadataSelection(tuple(copied), skipped)


def missing_code(config: dict[str, Any], folder: Path | None, copied: Collection[str]) -> tuple[str, ...]:
    """The code that a configuration's auto_map names and the release lacks: "tokenizer_config.json names x.py", sorted.

    `config`: config.json's table. Of `folder` the copied configurations are read that engines read.
    """
    tables = {CONFIG_NAME: config}
    if folder is not None:
        for name in config_names(copied):
            # A malformed one is copied as it is; signing and verifying refuse it.
            with suppress(MalformedError):
                tables[name] = parse_json_object(read_metadata(folder / name), name, MalformedError)
    return tuple(
        sorted({f"{name} names {code}" for name, table in tables.items() for code in _named_code(table) - set(copied)})
    )


def _named_code(table: dict[str, Any]) -> set[str]:
    """Files that auto_map tables at any depth name: "x.Class" is x.py, "org/name--x.Class" a file of a repository."""
    found: set[str] = set()
    pending: list[tuple[Any, bool]] = [(table, False)]
    while pending:
        value, is_map = pending.pop()
        if isinstance(value, dict):
            pending += [(item, is_map or key == _AUTO_MAP) for key, item in value.items()]
        elif isinstance(value, list):
            pending += [(item, is_map) for item in value]
        elif is_map and isinstance(value, str) and "." in value:
            repository, dashes, reference = value.rpartition("--")
            module = reference.rpartition(".")[0] + CODE_SUFFIX
            found.add(f"{repository}: {module}" if dashes else module)
    return found
