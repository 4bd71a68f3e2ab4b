"""What tests of pushing, pulling and deploying need beside a tiny signed release: its bytes, a trust.json."""

from __future__ import annotations

import json
from pathlib import Path

from tiny_releases import KEY

from memopt.manifests.keys import PrivateKey


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by relative name."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def policy_json(*keys: PrivateKey, **fields: object) -> str:
    """A trust.json that trusts `keys` (KEY, if none is named)."""
    entries = [{"pem": key.public_key.pem.decode()} for key in keys or (KEY,)]
    return json.dumps({"schema": "memopt.trust/1", "keys": entries} | fields)
