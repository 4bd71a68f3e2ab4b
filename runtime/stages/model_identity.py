"""What two stages must have in common: the model whose keys and values they exchange."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from memopt.errors import ConfigError, HandOverError, LedgerError
from memopt.manifests.file_roles import LEDGER_NAME
from memopt.manifests.release import Release
from memopt.manifests.release_description import CONFIG_NAME
from memopt.manifests.strict_json import parse_json_object

# Fields of config.json that tell how weights are stored, not what they compute.
_STORAGE_FIELDS = frozenset(
    {"quantization_config", "compression_config", "dtype", "torch_dtype", "transformers_version", "_name_or_path"}
)
# Buffers that engines compute; some recipes keep them, others drop them (docs/formats.md).
_BUFFER = ".rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """SHA-256 (hex) of the tensors that a release was made from, and of its config.json without storage fields.

    Releases of one checkpoint, in whatever formats, are equal; a release without a ledger equals only itself.
    """

    source: str
    config: str

    def require_same(self, other: ModelIdentity) -> None:
        """HandOverError unless `other`, the sender's, is the same model."""
        for what, mine, theirs in (("source", self.source, other.source), ("config.json", self.config, other.config)):
            if mine != theirs:
                raise HandOverError(
                    f"the prefill stage's model has another {what}: digest {theirs[:16]}, here {mine[:16]}",
                    remedy="open two releases of the same checkpoint",
                )


def model_identity(release: Release) -> ModelIdentity:
    """The identity of an open release's model, from its verified ledger and config.json.

    `source` is the SHA-256 of the lines "<SHA-256 of a source tensor>  <its name>", sorted by name. (The source table
    of release.json would not do: of a folder it has the headers' digests alone, which fine-tuned models share.)
    Raises LedgerError or ConfigError for files out of form, and what `read_file` raises.
    """
    source = release.root_digest
    if LEDGER_NAME in release.files_for():
        tensors = dict(_source_tensors(release.read_file(LEDGER_NAME)))
        source = _digest("".join(f"{sha256}  {name}\n" for name, sha256 in sorted(tensors.items())))
    config = parse_json_object(release.read_file(CONFIG_NAME), CONFIG_NAME, ConfigError)
    return ModelIdentity(source, _digest(repr(_without_storage(config))))


def _source_tensors(ledger: bytes) -> Iterator[tuple[str, str]]:
    """Name and SHA-256 (hex) of every tensor that the release was made from."""
    for number, line in enumerate(ledger.splitlines(), 1):
        try:
            for source in json.loads(line)["sources"]:
                if not source["name"].endswith(_BUFFER):
                    yield source["name"], source["sha256"]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise LedgerError(
                f"line {number} does not name its sources", file=LEDGER_NAME, remedy="compress the checkpoint again"
            ) from None


def _without_storage(value: Any) -> Any:
    """The same JSON in one order, without storage fields; canonical JSON would have no place for its floats."""
    if isinstance(value, dict):
        return sorted((name, _without_storage(part)) for name, part in value.items() if name not in _STORAGE_FIELDS)
    return [_without_storage(part) for part in value] if isinstance(value, list) else value


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
