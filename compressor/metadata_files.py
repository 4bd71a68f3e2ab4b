"""Which small files of a checkpoint come along, byte for byte: tokenizer, templates, generation config, licence."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from memopt.compressor.checkpoint.model_config import CONFIG_NAME
from memopt.errors import LayoutError, MalformedError
from memopt.manifests.safetensors_index import INDEX_NAME, WEIGHT_SUFFIX, is_plain_file_name
from memopt.manifests.strict_json import read_capped

CODE_SUFFIX = ".py"
MAX_METADATA_SIZE_BYTES = 512 * 2**20
# What memopt itself writes into a release: made anew, never copied from a source that is a release already.
RELEASE_FILE_NAMES = {"release.json", "ledger.jsonl", "SHA256SUMS", "model.sig", "quality.json", "report.html"}
_RELEASE_FILE = re.compile(r"memopt\..*|model\.[0-9a-f]{8}\.sig")
_WANTED = re.compile(
    r"tokenizer.*\.(json|model)|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
    r"|.*\.tiktoken|.*\.jinja|chat_template\.json|generation_config\.json|.*processor_config\.json"
    r"|.*preprocessor.*\.json|LICENSE.*|NOTICE.*|USE_POLICY.*|THIRD_PARTY_NOTICES.*",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class MetadataFile:
    """A small output file: its bytes' size and sha256, and where it comes from ("source" or "memopt")."""

    name: str
    size_bytes: int
    sha256: str
    origin: str


@dataclass(frozen=True)
class SkippedFile:
    """A source file that is not copied, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class MetadataSelection:
    """Files to copy as they are, and files left behind."""

    copied: tuple[MetadataFile, ...]
    skipped: tuple[SkippedFile, ...]


def is_metadata_file(name: str) -> bool:
    """Whether a source file of this name is copied byte for byte."""
    if name in {CONFIG_NAME, INDEX_NAME, *RELEASE_FILE_NAMES} or _RELEASE_FILE.fullmatch(name):
        return False
    return is_plain_file_name(name) and _WANTED.fullmatch(name) is not None


def _skip_reason(name: str) -> str:
    if name.endswith(CODE_SUFFIX):
        return "code is not copied unless it is allowed (--allow-code)"
    return "not a file that an engine needs beside the weights"


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_metadata(path: Path) -> bytes:
    return read_capped(path, MAX_METADATA_SIZE_BYTES, MalformedError)


def select_metadata(folder: Path, *, allow_code: bool) -> MetadataSelection:
    """Sort the small files of `folder` into copied and skipped; weights, config, index, release files are neither."""
    copied: list[MetadataFile] = []
    skipped: list[SkippedFile] = []
    for path in sorted(folder.iterdir()):
        name = path.name
        if not _is_utf8(name):
            raise LayoutError(
                f"{name!a} in {folder} is not a UTF-8 file name", remedy="rename or remove it: release.json lists it"
            )
        if name in {CONFIG_NAME, INDEX_NAME, *RELEASE_FILE_NAMES} or _RELEASE_FILE.fullmatch(name):
            continue
        if path.is_dir():
            skipped.append(SkippedFile(name + "/", "folders are not copied"))
        elif name.endswith(WEIGHT_SUFFIX):
            continue
        elif is_metadata_file(name) or (allow_code and name.endswith(CODE_SUFFIX)):
            raw = read_metadata(path)
            copied.append(MetadataFile(name, len(raw), hashlib.sha256(raw).hexdigest(), "source"))
        else:
            skipped.append(SkippedFile(name, _skip_reason(name)))
    return MetadataSelection(tuple(copied), tuple(skipped))
