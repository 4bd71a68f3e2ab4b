"""Statements and bundles for tests: good ones, and the hooks to bend them."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from typing import Any

from memopt.manifests.bundle import PAYLOAD_TYPE, pae, render_bundle
from memopt.manifests.keys import PrivateKey
from memopt.manifests.statement import Resource, render_statement

# What a bundle or statement test changes in the parsed JSON, in place.
Bend = Callable[[dict[str, Any]], Any]


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def resources(*names: str) -> list[Resource]:
    return [Resource(name, sha256(name)) for name in names]


def payload_of(*names: str, bend: Bend | None = None, fix_root: bool = True) -> bytes:
    """A statement over `names`; `bend` changes it; then, with `fix_root`, the root digest is computed anew."""
    payload = render_statement("model", resources(*(names or ("config.json", "model.safetensors"))))
    if bend is None:
        return payload
    table = json.loads(payload)
    bend(table)
    if fix_root:
        try:
            raw = b"".join(bytes.fromhex(entry["digest"]) for entry in table["predicate"]["resources"])
            table["subject"][0]["digest"]["sha256"] = hashlib.sha256(raw).hexdigest()
        except (KeyError, TypeError, ValueError, IndexError):
            pass
    return json.dumps(table).encode()


def bundle_of(
    key: PrivateKey, payload: bytes | None = None, *, signed_type: str = PAYLOAD_TYPE, bend: Bend | None = None
) -> bytes:
    """A bundle by `key`; `signed_type` is what the signature is over, `bend` changes the JSON after signing."""
    body = payload_of() if payload is None else payload
    raw = render_bundle(body, key.sign(pae(signed_type, body)), key.public_key)
    if bend is None:
        return raw
    table = json.loads(raw)
    bend(table)
    return json.dumps(table).encode()


def chain_bundle(key: PrivateKey, chain: list[bytes], payload: bytes | None = None) -> bytes:
    """A bundle by the key of the chain's leaf (DER, leaf first)."""

    def bend(table: dict[str, Any]) -> None:
        certificates = [{"rawBytes": base64.b64encode(der).decode()} for der in chain]
        table["verificationMaterial"] = {"x509CertificateChain": {"certificates": certificates}, "tlogEntries": []}

    return bundle_of(key, payload, bend=bend)
