"""Whether a release brings code: files that run when they are loaded, and configurations that name them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from memopt.errors import ConfigError, MemoptError, PolicyError
from memopt.manifests.file_roles import is_code
from memopt.manifests.signed_files import FileSource
from memopt.manifests.strict_json import parse_json_object

MAX_CONFIG_SIZE_BYTES = 64 * 2**20
# transformers imports the modules that these name, vLLM < 0.14 even without trust_remote_code (CVE-2026-22807).
_CODE_KEYS = ("auto_map", "custom_pipelines", "custom_generate")
_REMEDY = "publish without code, or set allow_code in the trust policy"


def config_names(names: Collection[str]) -> list[str]:
    """The configurations that an engine reads: config.json, tokenizer_config.json and their like, at the top."""
    return sorted(name for name in names if "/" not in name and name.endswith("config.json"))


def check_code(
    names: Collection[str], source: FileSource, readable: Collection[str], *, allow_code: bool
) -> list[MemoptError]:
    """PolicyError for every code file and every configuration that names code, unless it is allowed.

    Malformed configurations are ConfigError, code allowed or not.
    """
    problems: list[MemoptError] = []
    if not allow_code:
        problems += [
            PolicyError("runs code when it is loaded, and code is not allowed", file=name, remedy=_REMEDY)
            for name in sorted(names)
            if is_code(name)
        ]
    for name in config_names(names):
        if name not in readable:
            continue
        try:
            table = parse_json_object(source.read(name, MAX_CONFIG_SIZE_BYTES, ConfigError), name, ConfigError)
        except MemoptError as problem:
            problems.append(problem)
            continue
        key = None if allow_code else code_key(table)
        if key is not None:
            problems.append(PolicyError(f"{key} names code, and code is not allowed", file=name, remedy=_REMEDY))
    return problems


def code_key(value: Any) -> str | None:
    """The first key, at any depth, that names code to import."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            found = next((key for key in _CODE_KEYS if item.get(key)), None)
            if found is not None:
                return found
            pending += item.values()
        elif isinstance(item, list):
            pending += item
    return None
