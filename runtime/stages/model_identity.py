"""What two stages must have in common: the model whose keys and values they exchange."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from memopt.errors import ConfigError, HandOverError
from memopt.manifests.manifest import canonical_json
from memopt.manifests.release import Release
from memopt.manifests.release_description import CONFIG_NAME
from memopt.manifests.strict_json import parse_json_object

# Fields of config.json that tell how weights are stored, not what they compute.
_STORAGE_FIELDS = frozenset(
    {"quantization_config", "compression_config", "dtype", "torch_dtype", "transformers_version", "_name_or_path"}
)
# What a manifest says of the source when release.json does not name any.
_NO_SOURCE = hashlib.sha256(canonical_json({})).hexdigest()


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """SHA-256 (hex) of the checkpoint that a release was made from, and of its config.json without storage fields.

    Releases of one checkpoint, in whatever formats, are equal; a release of unknown source equals only itself.
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
    """The identity of an open release's model, from its signed manifest and its verified config.json."""
    manifest = release.manifest
    source = release.root_digest if manifest is None else manifest.source_digest
    if source == _NO_SOURCE:
        source = release.root_digest
    config = parse_json_object(release.read_file(CONFIG_NAME), CONFIG_NAME, ConfigError)
    return ModelIdentity(source, hashlib.sha256(repr(_without_storage(config)).encode()).hexdigest())


def _without_storage(value: Any) -> Any:
    """The same JSON in one order, without storage fields; canonical JSON would have no place for its floats."""
    if isinstance(value, dict):
        return sorted((name, _without_storage(part)) for name, part in value.items() if name not in _STORAGE_FIELDS)
    return [_without_storage(part) for part in value] if isinstance(value, list) else value
