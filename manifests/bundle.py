"""model.sig: a Sigstore bundle v0.3 with one DSSE envelope, as OMS v1.0 defines it; read strictly, written one way.

Source: github.com/ossf/model-signing-spec (spec/v1.0.md), github.com/secure-systems-lab/dsse (protocol.md).
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from typing import Any

from memopt.errors import BundleError, LfsPointerError, SignatureError, UnsupportedError
from memopt.manifests.digest import is_hex_digest
from memopt.manifests.keys import PublicKey
from memopt.manifests.strict_json import parse_json_object

BUNDLE_MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
MAX_BUNDLE_SIZE_BYTES = 64 * 2**20
MAX_CERTIFICATES = 10
_OTHER_MEDIA_TYPES = "application/vnd.dev.sigstore.bundle"
_LFS_POINTER = b"version https://git-lfs"
_MAX_CERTIFICATE_SIZE_BYTES = 64 * 2**10
_MAX_SIGNATURE_SIZE_BYTES = 4096


@dataclass(frozen=True)
class Bundle:
    """What a bundle says; nothing of it is trusted yet. `hint`: see PublicKey, None if the bundle names no key.

    `certificates`: DER, the leaf first; empty when a bare key signed.
    """

    payload: bytes
    payload_type: str
    signature: bytes
    hint: str | None
    certificates: tuple[bytes, ...]


def pae(payload_type: str, payload: bytes) -> bytes:
    """DSSE's pre-authentication encoding: the bytes that are signed."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def legacy_pae(payload_type: str, payload: bytes) -> bytes:
    """What model-signing 0.2 signed by mistake (the text of a Python bytes object); only ever used to refuse it."""
    return f"DSSEV1 {len(payload_type)} {payload_type} {len(payload)} {payload!r}".encode()


def parse_bundle(raw: bytes, file: str) -> Bundle:
    """Parse a bundle; the signature is not checked here.

    Raises BundleError (malformed), LfsPointerError, SignatureError for an empty certificate chain, UnsupportedError
    for well-formed bundles of other kinds: keyless, message signatures, formats before model-signing 1.1.
    """
    if not raw:
        raise BundleError("is empty", file=file, remedy="fetch the signature again")
    if len(raw) > MAX_BUNDLE_SIZE_BYTES:
        raise BundleError(f"{len(raw):,} bytes, at most {MAX_BUNDLE_SIZE_BYTES:,} are read", file=file)
    if raw.startswith(_LFS_POINTER):
        raise LfsPointerError("is a Git LFS pointer, not a signature", file=file, remedy="run `git lfs pull`")
    table = parse_json_object(raw, file, BundleError)
    _check_media_type(table.get("mediaType"), file)
    if "messageSignature" in table and "dsseEnvelope" not in table:
        raise UnsupportedError("signs a bare message, not an in-toto statement", file=file)
    _check_fields(table, "the bundle", {"mediaType", "verificationMaterial", "dsseEnvelope"}, set(), file)
    hint, certificates = _parse_material(table["verificationMaterial"], file)
    payload, signature = _parse_envelope(table["dsseEnvelope"], file)
    return Bundle(payload, PAYLOAD_TYPE, signature, hint, certificates)


def _check_media_type(media_type: object, file: str) -> None:
    if media_type == BUNDLE_MEDIA_TYPE:
        return
    if isinstance(media_type, str) and media_type.startswith(_OTHER_MEDIA_TYPES):
        raise UnsupportedError(
            f"media type {media_type!r:.120}; {BUNDLE_MEDIA_TYPE} is read", file=file, remedy="sign the release again"
        )
    raise BundleError(f"mediaType is {media_type!r:.120}, not {BUNDLE_MEDIA_TYPE}", file=file)


def _check_fields(table: Any, what: str, required: set[str], optional: set[str], file: str) -> None:
    if not isinstance(table, dict):
        raise BundleError(f"{what} is not an object", file=file)
    for name in sorted(required - set(table)):
        raise BundleError(f"{what} lacks {name}", file=file)
    for name in sorted(set(table) - required - optional):
        raise BundleError(f"{what} has an unknown field {name!r:.80}", file=file)


def _parse_material(material: Any, file: str) -> tuple[str | None, tuple[bytes, ...]]:
    kinds = {"publicKey", "x509CertificateChain", "certificate"}
    _check_fields(material, "verificationMaterial", set(), kinds | {"tlogEntries", "timestampVerificationData"}, file)
    present = sorted(kinds & set(material))
    if len(present) != 1:
        raise BundleError(f"needs exactly one of {', '.join(sorted(kinds))}, it has {present or 'none'}", file=file)
    if present == ["certificate"]:
        raise UnsupportedError(
            "a keyless (Sigstore) signature", file=file, remedy="verify it with `model_signing verify sigstore`"
        )
    for name in ("tlogEntries", "timestampVerificationData"):
        if material.get(name):
            raise UnsupportedError(f"{name} are present, which memopt cannot check", file=file)
    if not isinstance(material.get("tlogEntries", []), list):
        raise BundleError("tlogEntries is not a list", file=file)
    if not isinstance(material.get("timestampVerificationData", {}), dict):
        raise BundleError("timestampVerificationData is not an object", file=file)
    if present == ["publicKey"]:
        return _parse_hint(material["publicKey"], file), ()
    return None, _parse_chain(material["x509CertificateChain"], file)


def _parse_hint(public_key: Any, file: str) -> str | None:
    if isinstance(public_key, dict) and set(public_key) & {"rawBytes", "keyDetails"}:
        raise UnsupportedError(
            "a bundle in the form before model-signing 1.1", file=file, remedy="sign the release again"
        )
    _check_fields(public_key, "publicKey", set(), {"hint"}, file)
    hint = public_key.get("hint")
    if "hint" in public_key and not is_hex_digest(hint):
        raise BundleError(f"the key hint {hint!r:.80} is not 64 lower-case hex digits", file=file)
    return hint


def _parse_chain(chain: Any, file: str) -> tuple[bytes, ...]:
    _check_fields(chain, "x509CertificateChain", {"certificates"}, set(), file)
    certificates = chain["certificates"]
    if not isinstance(certificates, list):
        raise BundleError("certificates is not a list", file=file)
    if not certificates:
        raise SignatureError("the certificate chain is empty", file=file)
    if len(certificates) > MAX_CERTIFICATES:
        raise SignatureError(f"{len(certificates):,} certificates, at most {MAX_CERTIFICATES} make a chain", file=file)
    for certificate in certificates:
        _check_fields(certificate, "a certificate", {"rawBytes"}, set(), file)
    return tuple(
        _decode(certificate["rawBytes"], "a certificate", _MAX_CERTIFICATE_SIZE_BYTES, file)
        for certificate in certificates
    )


def _parse_envelope(envelope: Any, file: str) -> tuple[bytes, bytes]:
    _check_fields(envelope, "dsseEnvelope", {"payload", "payloadType", "signatures"}, set(), file)
    if envelope["payloadType"] != PAYLOAD_TYPE:
        raise BundleError(f"payloadType is {envelope['payloadType']!r:.120}, not {PAYLOAD_TYPE}", file=file)
    signatures = envelope["signatures"]
    if not isinstance(signatures, list) or len(signatures) != 1:
        count = f"{len(signatures):,}" if isinstance(signatures, list) else "no list of"
        raise BundleError(f"{count} signatures, a bundle has exactly one", file=file)
    _check_fields(signatures[0], "a signature", {"sig"}, {"keyid"}, file)
    if not isinstance(signatures[0].get("keyid", ""), str):
        raise BundleError("keyid is not a string", file=file)
    payload = _decode(envelope["payload"], "the payload", MAX_BUNDLE_SIZE_BYTES, file)
    return payload, _decode(signatures[0]["sig"], "the signature", _MAX_SIGNATURE_SIZE_BYTES, file)


def _decode(text: object, what: str, max_size_bytes: int, file: str) -> bytes:
    """Strict base64: standard alphabet, padding, no white space, unused bits zero (RFC 4648, sections 3.3, 3.5, 4)."""
    if not isinstance(text, str):
        raise BundleError(f"{what} is not a string", file=file)
    if len(text) > max_size_bytes // 3 * 4 + 4:
        raise BundleError(f"{what} has {len(text):,} characters, which is too many", file=file)
    try:
        value = binascii.a2b_base64(text, strict_mode=True)
        is_canonical = binascii.b2a_base64(value, newline=False) == text.encode()
    except ValueError:
        value, is_canonical = b"", False
    if not is_canonical or not value:
        raise BundleError(
            f"{what} is not strict base64 (RFC 4648: standard alphabet, padded, no line breaks)",
            file=file,
            remedy="fetch the signature again",
        )
    return value


def render_bundle(payload: bytes, signature: bytes, public_key: PublicKey) -> bytes:
    """The bundle's bytes: the same for the same arguments, and nothing in them is free to change."""
    table = {
        "mediaType": BUNDLE_MEDIA_TYPE,
        "verificationMaterial": {"publicKey": {"hint": public_key.hint}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
        },
    }
    return json.dumps(table, separators=(",", ":")).encode()
