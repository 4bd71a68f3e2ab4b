"""What a file of a release is for, and which ranks need it: both follow from its name."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from memopt.manifests.file_names import CHUNKS_NAME
from memopt.manifests.rank_folders import rank_folder_of
from memopt.manifests.safetensors_index import WEIGHT_SUFFIX

INDEX_SUFFIX = ".safetensors.index.json"
LEDGER_NAME = "ledger.jsonl"
# Formats that run code when they are loaded: Python, shared libraries, and pickles, which torch.load executes.
_CODE = re.compile(
    r".*\.(py|pyc|pyo|pyd|so|dll|dylib|pkl|pickle|pt|pth|ckpt|joblib)|pytorch_model.*\.bin", re.IGNORECASE
)
_TOKENIZER = re.compile(
    r"tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\..*|merges\.txt|.*\.tiktoken|.*\.model"
)

# What an evaluation adds to a release.
QUALITY_NAMES = frozenset({"quality.json", "report.html"})


def is_code(path: str) -> bool:
    """Whether loading the file may run code that comes with the release."""
    return _CODE.fullmatch(path.rsplit("/", 1)[-1]) is not None


def is_weights(path: str) -> bool:
    return path.endswith(WEIGHT_SUFFIX)


def role_of(path: str) -> str:
    """One of manifest.ROLES."""
    name = path.rsplit("/", 1)[-1]
    if path == CHUNKS_NAME:
        return "chunks"
    if is_weights(name):
        return "weights"
    if name.endswith(INDEX_SUFFIX):
        return "index"
    if is_code(name):
        return "code"
    if path == LEDGER_NAME:
        return "ledger"
    if path in QUALITY_NAMES:
        return "quality"
    if name.endswith(".jinja") or name == "chat_template.json":
        return "template"
    if _TOKENIZER.fullmatch(name):
        return "tokenizer"
    return "config" if name.endswith("config.json") else "other"


def ranks_of(path: str) -> tuple[int, ...] | None:
    """The one rank that needs a file of a rank layout (tp8/rank-3/…, ep8/rank-3/…); None: all do."""
    found = rank_folder_of(path)
    return None if found is None else (found.rank,)


def needed_files(
    ranks_by_name: Mapping[str, tuple[int, ...] | None], ranks: Collection[int] | None, layout: str | None = None
) -> set[str]:
    """The files that `ranks` (None: everybody) need: their own, and all files of no rank.

    Where a release has a rank layout, its hub weights and index are not needed by a rank. `layout`: of several rank
    layouts only that folder's ("tp8").
    """
    if ranks is None:
        return set(ranks_by_name)
    has_rank_layout = any(value is not None for value in ranks_by_name.values())
    return {
        name
        for name, value in ranks_by_name.items()
        if (value is None and not (has_rank_layout and role_of(name) in {"weights", "index"}))
        or (value is not None and set(value) & set(ranks) and is_of_layout(name, layout))
    }


def is_of_layout(path: str, layout: str | None) -> bool:
    """Whether a rank's file is one of rank layout `layout` ("tp8"; None: any)."""
    return layout is None or path.startswith(f"{layout}/")


def known_ranks(ranks_by_name: Mapping[str, tuple[int, ...] | None], layout: str | None = None) -> set[int]:
    """Every rank that has files of its own, in rank layout `layout` (None: any)."""
    return {
        rank
        for name, value in ranks_by_name.items()
        if value is not None and is_of_layout(name, layout)
        for rank in value
    }
