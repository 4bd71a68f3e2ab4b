"""Which names a release may hold: plain relative paths that mean the same file on every system."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from memopt.errors import FileNameError

MANIFEST_NAME = "memopt.manifest.json"
CHUNKS_NAME = "memopt.chunks"
SUMS_NAME = "SHA256SUMS"
SIGNATURE_NAME = "model.sig"
MAX_NAME_BYTES = 1024
MAX_COMPONENT_BYTES = 255
# Reading direction and zero-width characters: a name that shows as another one.
_HIDDEN_CATEGORIES = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def is_signature_name(name: str) -> bool:
    """Whether `name` is model.sig or model.<8 hex>.sig, at the top of a release."""
    if name == SIGNATURE_NAME:
        return True
    middle = name.removeprefix("model.").removesuffix(".sig")
    return name == f"model.{middle}.sig" and len(middle) == 8 and set(middle) <= set("0123456789abcdef")


def check_file_name(name: str) -> None:
    """FileNameError (malformed) unless `name` is a relative path of plain components, separated by "/"."""
    fault = _fault(name)
    if fault:
        raise FileNameError(f"file name {name!a} {fault}", remedy="a release holds plain relative names only")


def _fault(name: str) -> str:
    if not name:
        return "is empty"
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        return "is not UTF-8"
    if len(encoded) > MAX_NAME_BYTES:
        return f"is longer than {MAX_NAME_BYTES} bytes"
    is_plain = name.isascii() and name.isprintable()
    if not is_plain and any(unicodedata.category(character) in _HIDDEN_CATEGORIES for character in name):
        return "holds a control or hidden character"
    if "\\" in name or ":" in name:
        return "holds a backslash or colon"
    for component in name.split("/"):
        if component in {"", ".", ".."}:
            return "has an empty, . or .. part"
        if len(component.encode()) > MAX_COMPONENT_BYTES:
            return f"has a part longer than {MAX_COMPONENT_BYTES} bytes"
    return ""


def first_collision(names: Iterable[str]) -> tuple[str, str] | None:
    """Two names that repeat, or are one file where case is folded or accents are composed; None if all differ."""
    seen: dict[str, str] = {}
    for name in names:
        folded = unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
        if folded in seen:
            return seen[folded], name
        seen[folded] = name
    return None
