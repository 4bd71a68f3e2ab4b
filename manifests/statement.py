"""The signed statement: in-toto Statement v1 with the OMS v1.0 predicate, a list of every file and its SHA-256.

Source: github.com/ossf/model-signing-spec, spec/v1.0.md. Names are checked here, before anything is opened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from memopt.errors import BundleError, FileNameError, LayoutError, PolicyError, UnsupportedError
from memopt.manifests.digest import is_hex_digest
from memopt.manifests.file_names import SIGNATURE_NAME, check_file_name, first_collision, is_signature_name
from memopt.manifests.manifest import MAX_FILES, canonical_json
from memopt.manifests.strict_json import parse_json_object

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"
LEGACY_PREDICATE_TYPE = "https://model_signing/Digests/v0.1"
# What model_signing always leaves out, at the top of the folder; a reader may not be asked to overlook more.
GIT_PATHS = (".git", ".gitattributes", ".github", ".gitignore")
_MAX_SUBJECT_CHARACTERS = 1024


@dataclass(frozen=True)
class Resource:
    """One signed file. `sha256`: 64 lower-case hex digits."""

    name: str
    sha256: str


@dataclass(frozen=True)
class Statement:
    """What was signed. `root_digest`: SHA-256 (hex) over the raw digests in list order; names are not in it.

    `subject_name` is for people only. `ignore_paths`: what the signer left out, from a fixed list.
    """

    subject_name: str
    root_digest: str
    resources: tuple[Resource, ...]
    ignore_paths: tuple[str, ...]

    def digests(self) -> dict[str, str]:
        """File name -> SHA-256 (hex)."""
        return {resource.name: resource.sha256 for resource in self.resources}


def root_digest(digests: Iterable[str]) -> str:
    """SHA-256 (hex) over the concatenated raw digests, as OMS computes it."""
    state = hashlib.sha256()
    for digest in digests:
        state.update(bytes.fromhex(digest))
    return state.hexdigest()


def component_order(name: str) -> list[str]:
    """Sort key: by path component, as model_signing sorts ("sub/b" before "sub-b")."""
    return name.split("/")


def parse_statement(payload: bytes, file: str = SIGNATURE_NAME) -> Statement:
    """Parse a payload whose signature holds; `file` is the bundle it came from.

    Raises BundleError or FileNameError (malformed), UnsupportedError for other methods, hashes and the predicate of
    model-signing 0.x, LayoutError for names that are one file on some systems, PolicyError for ignored paths.
    """
    table = parse_json_object(payload, file, BundleError)
    _check_exact(table, "the statement", {"_type", "subject", "predicateType", "predicate"}, file)
    if table["_type"] != STATEMENT_TYPE:
        raise BundleError(f"_type is {table['_type']!r:.120}, not {STATEMENT_TYPE}", file=file)
    if table["predicateType"] == LEGACY_PREDICATE_TYPE:
        raise UnsupportedError(
            f"predicate {LEGACY_PREDICATE_TYPE} of model-signing 0.x", file=file, remedy="sign the release again"
        )
    if table["predicateType"] != PREDICATE_TYPE:
        raise BundleError(f"predicateType is {table['predicateType']!r:.120}, not {PREDICATE_TYPE}", file=file)
    subject_name, subject_digest = _parse_subject(table["subject"], file)
    predicate = table["predicate"]
    _check_exact(predicate, "the predicate", {"serialization", "resources"}, file)
    ignore_paths = _parse_serialization(predicate["serialization"], file)
    resources = _parse_resources(predicate["resources"], ignore_paths, file)
    computed = root_digest(resource.sha256 for resource in resources)
    if computed != subject_digest:
        raise BundleError(f"the root digest is {subject_digest}, its files give {computed}", file=file)
    return Statement(subject_name, subject_digest, resources, ignore_paths)


def _check_exact(table: Any, what: str, names: set[str], file: str) -> None:
    if not isinstance(table, dict):
        raise BundleError(f"{what} is not an object", file=file)
    if set(table) != names:
        raise BundleError(f"{what} has fields {sorted(table)!r:.200}, not {sorted(names)}", file=file)


def _parse_subject(subjects: Any, file: str) -> tuple[str, str]:
    if not isinstance(subjects, list) or len(subjects) != 1:
        raise BundleError("the statement must have exactly one subject", file=file)
    _check_exact(subjects[0], "the subject", {"name", "digest"}, file)
    name, digest = subjects[0]["name"], subjects[0]["digest"]
    if not isinstance(name, str) or len(name) > _MAX_SUBJECT_CHARACTERS:
        raise BundleError("the subject's name is not a short string", file=file)
    _check_exact(digest, "the subject's digest", {"sha256"}, file)
    if not is_hex_digest(digest["sha256"]):
        raise BundleError(f"the root digest {digest['sha256']!r:.80} is not 64 lower-case hex digits", file=file)
    return name, digest["sha256"]


def _parse_serialization(serialization: Any, file: str) -> tuple[str, ...]:
    if not isinstance(serialization, dict):
        raise BundleError("serialization is not an object", file=file)
    if serialization.get("method") == "shards":
        raise UnsupportedError("signed by shards; whole files are read", file=file, remedy="sign it with method files")
    if serialization.get("hash_type") in ("blake2b", "blake3"):
        raise UnsupportedError(f"signed with {serialization['hash_type']}; sha256 is read", file=file)
    if serialization.get("allow_symlinks") is True:
        raise UnsupportedError("signed with allow_symlinks; a release holds no links", file=file)
    _check_exact(serialization, "serialization", {"method", "hash_type", "allow_symlinks", "ignore_paths"}, file)
    wanted = {"method": "files", "hash_type": "sha256", "allow_symlinks": False}
    for field, value in wanted.items():
        if serialization[field] != value or type(serialization[field]) is not type(value):
            raise BundleError(f"{field} is {serialization[field]!r:.80}, not {value!r}", file=file)
    return _parse_ignore_paths(serialization["ignore_paths"], file)


def _parse_ignore_paths(paths: Any, file: str) -> tuple[str, ...]:
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise BundleError("ignore_paths is not a list of strings", file=file)
    for path in paths:
        if path in GIT_PATHS or is_signature_name(path):
            continue
        try:
            check_file_name(path)
        except FileNameError as problem:
            raise BundleError(f"ignore_paths: {problem.message}", file=file) from None
        if set(path) & set("*?["):
            raise BundleError(f"ignore_paths: {path!r:.120} is a pattern", file=file)
        raise PolicyError(
            f"the signer left {path!r:.120} out of the signature; only Git's files and signatures may be left out",
            file=file,
            remedy="sign the whole folder",
        )
    if len(set(paths)) != len(paths):
        raise BundleError("ignore_paths repeats a path", file=file)
    return tuple(paths)


def _parse_resources(entries: Any, ignore_paths: tuple[str, ...], file: str) -> tuple[Resource, ...]:
    if not isinstance(entries, list) or not 0 < len(entries) <= MAX_FILES:
        count = f"{len(entries):,}" if isinstance(entries, list) else "no list of"
        raise BundleError(f"{count} files, 1 to {MAX_FILES:,} can be signed", file=file)
    resources = tuple(_parse_resource(entry, file) for entry in entries)
    ignored = {*ignore_paths, *GIT_PATHS}
    seen: set[str] = set()
    for resource in resources:
        if resource.name in seen:
            raise BundleError(f"{resource.name!r:.200} is listed twice", file=file)
        seen.add(resource.name)
        top = resource.name.split("/", 1)[0]
        if top in ignored or is_signature_name(resource.name):
            raise BundleError(f"{resource.name!r:.200} is listed, but lies under an ignored path", file=file)
    collision = first_collision(resource.name for resource in resources)
    if collision is not None:
        raise LayoutError(
            f"{collision[0]!r:.200} and {collision[1]!r:.200} are one file on some systems",
            file=file,
            remedy="rename one of them and sign again",
        )
    return resources


def _parse_resource(entry: Any, file: str) -> Resource:
    # OMS lets a descriptor have further fields, which verifiers must overlook.
    if not isinstance(entry, dict) or not {"name", "algorithm", "digest"} <= set(entry):
        raise BundleError("a resource must have name, algorithm and digest", file=file)
    name, algorithm, digest = entry["name"], entry["algorithm"], entry["digest"]
    if not isinstance(name, str):
        raise BundleError(f"a resource is named {name!r:.80}", file=file)
    check_file_name(name)
    if algorithm != "sha256":
        raise BundleError(f"{name!r:.200}: algorithm is {algorithm!r:.80}, not sha256", file=file)
    if not is_hex_digest(digest):
        raise BundleError(f"{name!r:.200}: digest {digest!r:.80} is not 64 lower-case hex digits", file=file)
    return Resource(name, digest)


def render_statement(
    name: str, resources: Iterable[Resource], signature_names: Iterable[str] = (SIGNATURE_NAME,)
) -> bytes:
    """The payload to sign: canonical JSON, files in model_signing's order, so that the root digests are equal.

    `signature_names`: every signature file that the folder will hold. Raises as `parse_statement`: what is written
    can be read.
    """
    ordered = sorted(resources, key=lambda resource: component_order(resource.name))
    table = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": root_digest(entry.sha256 for entry in ordered)}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": sorted({*GIT_PATHS, *signature_names}),
            },
            "resources": [{"name": entry.name, "algorithm": "sha256", "digest": entry.sha256} for entry in ordered],
        },
    }
    payload = canonical_json(table)
    parse_statement(payload)
    return payload
