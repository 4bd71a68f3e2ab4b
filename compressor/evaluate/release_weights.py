"""A release's weights by their digests, out of its ledger: what quality.json is bound to.

The digests are of whole tensors, so that they are the same for hub files, rank files and both: figures hold for a
release however its files are cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memopt.errors import ContentError, LedgerError, MalformedError, MissingFileError, UsageError
from memopt.manifests.digest import is_hex_digest
from memopt.manifests.file_roles import LEDGER_NAME
from memopt.manifests.ledger_output import ledger_outputs
from memopt.manifests.release_description import RELEASE_NAME
from memopt.manifests.strict_json import parse_json_object, read_capped

MAX_RELEASE_SIZE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class ReleaseWeights:
    """SHA-256 (hex) by name: `outputs` of the tensors it stores, `sources` of the tensors it was made from."""

    outputs: Mapping[str, str]
    sources: Mapping[str, str]

    @property
    def sha256(self) -> str:
        """`digest_of_tensors` of the outputs."""
        return digest_of_tensors(self.outputs)


def digest_of_tensors(digests: Mapping[str, str]) -> str:
    """SHA-256 (hex) of a line "digest  name" for every tensor, by name."""
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def is_release(folder: Path) -> bool:
    """Whether memopt made it: it has a release.json and a ledger."""
    return (folder / LEDGER_NAME).is_file() and (folder / RELEASE_NAME).is_file()


def require_release(folder: Path) -> None:
    """UsageError unless `is_release`."""
    if not is_release(folder):
        raise UsageError(
            f"{folder} has no {RELEASE_NAME} and {LEDGER_NAME}", remedy="name the base first, then the release"
        )


def release_table(folder: Path) -> dict[str, Any]:
    """release.json of `folder`; MalformedError for what is no JSON object."""
    return parse_json_object(
        read_capped(folder / RELEASE_NAME, MAX_RELEASE_SIZE_BYTES, MalformedError), RELEASE_NAME, MalformedError
    )


def read_release_weights(folder: Path) -> ReleaseWeights:
    """The digests that ledger.jsonl of `folder` lists, a line in memory at a time.

    ContentError if it is not the ledger that release.json names, LedgerError naming the line that breaks the format.
    """
    outputs: dict[str, str] = {}
    sources: dict[str, str] = {}
    digest = hashlib.sha256()
    if not (folder / LEDGER_NAME).is_file():
        raise MissingFileError("is not there", file=LEDGER_NAME, remedy="fetch the release again")
    with open(folder / LEDGER_NAME, "rb") as stream:
        for output in ledger_outputs(_with_sources(stream, sources, digest)):
            outputs[output.tensor.name] = output.sha256
    ledger = release_table(folder).get("ledger")
    if not isinstance(ledger, dict) or ledger.get("sha256") != digest.hexdigest():
        raise ContentError("is not the ledger that release.json names", file=LEDGER_NAME, remedy="compress again")
    return ReleaseWeights(outputs, sources)


def _with_sources(lines: Iterable[bytes], sources: dict[str, str], digest: Any) -> Iterator[bytes]:
    """`lines` as they are; on the way they are hashed into `digest`, and their sources' digests kept."""
    for number, line in enumerate(lines, start=1):
        digest.update(line)
        place = f"{LEDGER_NAME}:{number}"
        parts = parse_json_object(line, place, LedgerError).get("sources")
        for part in parts if isinstance(parts, list) else [None]:
            name, sha256 = (part.get("name"), part.get("sha256")) if isinstance(part, dict) else (None, None)
            # A dropped tensor was never read: it has no digest.
            if not isinstance(name, str) or not (sha256 is None or is_hex_digest(sha256)):
                raise LedgerError("a source must have name and sha256", file=place, remedy="compress again")
            if isinstance(sha256, str):
                sources[name] = sha256
        yield line
