"""Which files beside the weights come along: the one rule, for a folder and for the Hub's listing alike.

Everything small is copied byte for byte, but what runs (code, pickles), what holds other weights, and what describes
the source instead of the release. A list of wanted names would lose the tokenizer of the next family.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from memopt.compressor.checkpoint.model_config import CONFIG_NAME
from memopt.errors import FileNameError, MalformedError
from memopt.manifests.file_names import SIGNATURE_NAME, SUMS_NAME, check_file_name, is_signature_name
from memopt.manifests.file_roles import LEDGER_NAME, is_code, role_of
from memopt.manifests.release_description import RELEASE_NAME
from memopt.manifests.safetensors_index import INDEX_NAME, is_plain_file_name

CODE_SUFFIX = ".py"
FOLDER_MARK = "/"
# GLM's tokenizer.json has 20 MB, Gemma's 33 MB.
MAX_METADATA_SIZE_BYTES = 64 * 2**20
# What memopt itself writes into a release: made anew, never copied from a source that is a release already.
MADE_ANEW = frozenset(
    {CONFIG_NAME, INDEX_NAME, RELEASE_NAME, LEDGER_NAME, SUMS_NAME, SIGNATURE_NAME, "quality.json", "report.html"}
)
_OWN_PREFIX = "memopt."
_RUNS = re.compile(r".*\.(bin|sh|bash|bat|ps1|exe|js|ipynb|npy|jar|mar|nemo|keras|pb)", re.IGNORECASE)
_OTHER_WEIGHTS = re.compile(
    r".*\.(safetensors|gguf|ggml|ggmlv3|onnx|onnx_data|h5|hdf5|msgpack|npz|ot|tflite|mlmodel|engine|plan)"
    r"|.*\.(safetensors|bin|h5|msgpack)\.index\.json",
    re.IGNORECASE,
)
_MEDIA = re.compile(
    r".*\.(png|jpe?g|gif|webp|svg|bmp|tiff?|ico|pdf|docx?|pptx?|mp[34]|m4a|wav|flac|ogg|avi|mov|webm"
    r"|zip|tar|gz|tgz|bz2|xz|7z|zst|rar|parquet|arrow)",
    re.IGNORECASE,
)
_CARD = re.compile(r"readme([._-].*)?", re.IGNORECASE)
# vLLM and SGLang read the first ones like a quantization_config; transformers loads an adapter where it sees its file.
_MISLEADING = {"hf_quant_config.json", "quantize_config.json", "quant_config.json", "quantization_config.json"}
_ADAPTER = "adapter_config.json"
# Without these an engine has another tokenizer, template or default than the source: they are never left out quietly.
_NEEDED_ROLES = {"tokenizer", "template", "config"}


@dataclass(frozen=True)
class SourceFile:
    """Something at the top of a source. A folder's name ends with "/".

    `size_bytes` is None for a folder and for what is no regular file.
    """

    name: str
    size_bytes: int | None


@dataclass(frozen=True)
class SkippedFile:
    """A source file that is not copied, and why."""

    name: str
    reason: str


def is_made_anew(name: str) -> bool:
    """Whether memopt writes a file of this name itself."""
    return name in MADE_ANEW or name.startswith(_OWN_PREFIX) or is_signature_name(name)


def is_of_repository(name: str) -> bool:
    """Whether it belongs to the repository that a release lies in, not to the release: git's and the Hub client's
    files and folders, and a model card.
    """
    return name.startswith(".") or _CARD.fullmatch(name) is not None


def skip_reason(name: str, *, allow_code: bool = False) -> str | None:
    """Why a file of this name is never copied; None if it is."""
    if name.endswith(FOLDER_MARK):
        return "folders are not copied"
    if not _is_plain(name):
        return "its name is not a plain file name"
    if name.lower().endswith(CODE_SUFFIX):
        return None if allow_code else "code is not copied unless it is allowed (--allow-code)"
    if is_code(name) or _RUNS.fullmatch(name):
        return "pickles and programs are never copied"
    if _OTHER_WEIGHTS.fullmatch(name):
        return "belongs to weights that the index does not name"
    if _MEDIA.fullmatch(name):
        return "images, documents and archives are not copied"
    if name.startswith("."):
        return "belongs to the repository, not to the model"
    if _CARD.fullmatch(name):
        return "describes the source, not this release"
    if name.lower() in _MISLEADING:
        return "describes how the source is quantized, not this release"
    if name.lower() == _ADAPTER:
        return "would make an engine load an adapter that is not here"
    if is_made_anew(name) or name.lower() in {made.lower() for made in MADE_ANEW}:
        return "memopt writes a file of this name itself"
    return None


def _is_plain(name: str) -> bool:
    try:
        check_file_name(name)
    except FileNameError:
        return False
    return is_plain_file_name(name)


def sort_small_files(
    files: Iterable[SourceFile], *, weights: Collection[str], allow_code: bool
) -> tuple[tuple[SourceFile, ...], tuple[SkippedFile, ...]]:
    """Files to copy and files left behind, by name; `weights` and what memopt makes anew are neither.

    MalformedError for a tokenizer, template or configuration that is too large; another large file is left behind.
    """
    copied: list[SourceFile] = []
    skipped: list[SkippedFile] = []
    for file in sorted(files, key=lambda file: file.name):
        if file.name in weights or is_made_anew(file.name):
            continue
        reason = skip_reason(file.name, allow_code=allow_code)
        if reason is None and (file.size_bytes is None or file.size_bytes > MAX_METADATA_SIZE_BYTES):
            reason = _odd_file(file)
        if reason is None:
            copied.append(file)
        else:
            skipped.append(SkippedFile(_printable(file.name), reason))
    return tuple(copied), tuple(skipped)


def _odd_file(file: SourceFile) -> str | None:
    """Why a large or special file is left behind; None for one that is needed, whose reading names the fault."""
    is_needed = role_of(file.name) in _NEEDED_ROLES
    if file.size_bytes is None:
        return None if is_needed else "is not a regular file"
    if is_needed:
        raise MalformedError(
            f"{file.size_bytes:,} bytes, at most {MAX_METADATA_SIZE_BYTES:,} are read",
            file=file.name,
            remedy="fetch the file again, or remove it",
        )
    return f"{file.size_bytes:,} bytes: only files up to {MAX_METADATA_SIZE_BYTES:,} are copied"


def _printable(name: str) -> str:
    return name if name.isprintable() else ascii(name)[1:-1]
