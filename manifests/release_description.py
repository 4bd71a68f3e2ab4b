"""What a release says about itself before it is signed: release.json, and the manifest of the release before it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memopt.errors import ConfigError, ManifestError, UsageError
from memopt.manifests.digest import is_hex_digest
from memopt.manifests.file_names import MANIFEST_NAME
from memopt.manifests.manifest import MAX_MANIFEST_SIZE_BYTES, Manifest, canonical_json, parse_manifest
from memopt.manifests.signed_files import FileSource
from memopt.manifests.strict_json import parse_json_object, read_capped

RELEASE_NAME = "release.json"
CONFIG_NAME = "config.json"
_MAX_SIZE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class ReleaseDescription:
    """`name` and `family` are None where nothing tells them. `ledger_sha256`: what release.json says of ledger.jsonl.

    `source_digest`, `recipe_digest`: SHA-256 (hex) of release.json's tables in canonical JSON, of {} without any.
    """

    name: str | None
    family: str | None
    source_digest: str
    recipe_digest: str
    tools: dict[str, str]
    ledger_sha256: str | None


def describe(names: Collection[str], source: FileSource) -> ReleaseDescription:
    """Read release.json and config.json, where they are; ConfigError if one is malformed."""
    release = _table(RELEASE_NAME, names, source)
    config = _table(CONFIG_NAME, names, source)
    identity = _part(release, "identity")
    ledger = _part(release, "ledger").get("sha256")
    if ledger is not None and not is_hex_digest(ledger):
        raise ConfigError("ledger.sha256 is not 64 lower-case hex digits", file=RELEASE_NAME, remedy="compress again")
    return ReleaseDescription(
        _text(identity.get("name")),
        _text(identity.get("family")) or _text(config.get("model_type")),
        hashlib.sha256(canonical_json(_part(release, "source"))).hexdigest(),
        hashlib.sha256(canonical_json(_part(release, "recipe"))).hexdigest(),
        {name: version for name, version in _part(release, "tool").items() if isinstance(version, str)},
        ledger,
    )


def _table(name: str, names: Collection[str], source: FileSource) -> dict[str, Any]:
    if name not in names:
        return {}
    return parse_json_object(source.read(name, _MAX_SIZE_BYTES, ConfigError), name, ConfigError)


def _part(release: dict[str, Any], name: str) -> dict[str, Any]:
    value = release.get(name, {})
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be a table", file=RELEASE_NAME, remedy="compress again")
    return value


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def read_previous(path: Path) -> tuple[Manifest, str]:
    """The manifest of the release before, from its folder or its file, and SHA-256 (hex) of its bytes.

    It is not verified: it is the signer's own. Raises MissingFileError, ManifestError, MemoptIOError.
    """
    raw = read_capped(path / MANIFEST_NAME if path.is_dir() else path, MAX_MANIFEST_SIZE_BYTES, ManifestError)
    return parse_manifest(raw), hashlib.sha256(raw).hexdigest()


def next_counter(counter: int | None, identity: str, previous: Manifest | None) -> int:
    """The release's counter: the given one, or one more than the release before, or 1.

    UsageError if it does not rise or if the release before is of another identity.
    """
    if previous is None:
        return 1 if counter is None else counter
    if previous.identity != identity:
        raise UsageError(f"the previous release is {previous.identity!r}, this one is {identity!r}")
    if counter is not None and counter <= previous.counter:
        raise UsageError(
            f"counter {counter} does not rise above the previous release's {previous.counter}",
            remedy=f"use {previous.counter + 1} or more",
        )
    return previous.counter + 1 if counter is None else counter
