"""Opening releases in tests, and what safetensors says is in them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors.torch import load_file
from signed_statements import bundle_of
from tiny_releases import (
    KEY,
    NOW,
    POLICY,
    SHARDS,
    THREE_CHUNKS,
    write_release,
)

from memopt.manifests.release import Release, open_release
from memopt.manifests.statement import Resource, render_statement

EMBED = "model.layers.0.attention.weight"


def opened(folder: Path, **options: object) -> Release:
    return open_release(folder, **({"policy": POLICY, "now": NOW} | options))  # type: ignore[arg-type]


def hub_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / SHARDS[0]) | load_file(folder / SHARDS[1])


def whole_file_release(folder: Path) -> Path:
    """A release as `model_signing sign` leaves it: a signature, no manifest, no chunks."""
    write_release(folder, rows=THREE_CHUNKS // 8)
    (folder / "ledger.jsonl").unlink()
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    payload = render_statement("tiny", [Resource(name, digest) for name, digest in digests.items()])
    (folder / "model.sig").write_bytes(bundle_of(KEY, payload))
    return folder
