"""The bundle parser takes one form and refuses the rest, with the class that says why (rows 25, 30, 32, 34)."""

from __future__ import annotations

import base64
import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal
from signed_statements import Bend, bundle_of, payload_of
from signing_keys import fixed_key

from memopt.errors import BundleError, LfsPointerError, MemoptError, SignatureError, UnsupportedError
from memopt.manifests import bundle as bundle_module
from memopt.manifests.bundle import PAYLOAD_TYPE, legacy_pae, pae, parse_bundle, render_bundle

KEY = fixed_key()
PAYLOAD = payload_of()
GOOD = bundle_of(KEY, PAYLOAD)


def test_pae_is_the_specifications_example() -> None:
    """github.com/secure-systems-lab/dsse, protocol.md, "Test vectors"."""
    wanted = b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    assert pae("http://example.com/HelloWorld", b"hello world") == wanted
    assert pae("é", "é".encode()) == b"DSSEv1 2 \xc3\xa9 2 \xc3\xa9"
    assert legacy_pae("t", b"a\n") == b"DSSEV1 1 t 2 b'a\\n'"


def test_round_trip_and_the_same_bytes() -> None:
    bundle = parse_bundle(GOOD, "model.sig")
    assert bundle.payload == PAYLOAD
    assert bundle.payload_type == PAYLOAD_TYPE
    assert bundle.signature == KEY.sign(pae(PAYLOAD_TYPE, PAYLOAD))
    assert bundle.hint == KEY.public_key.hint
    assert bundle.certificates == ()
    assert render_bundle(bundle.payload, bundle.signature, KEY.public_key) == GOOD
    assert not any(space in GOOD for space in b" \n\t\r"), "white space could change unnoticed"


def bent(bend: Bend) -> bytes:
    table = json.loads(GOOD)
    bend(table)
    return json.dumps(table).encode()


def material(table: dict[str, Any]) -> dict[str, Any]:
    return table["verificationMaterial"]


def envelope(table: dict[str, Any]) -> dict[str, Any]:
    return table["dsseEnvelope"]


def only_certificates(*certificates: Any) -> Bend:
    def bend(table: dict[str, Any]) -> None:
        table["verificationMaterial"] = {"x509CertificateChain": {"certificates": list(certificates)}}

    return bend


@pytest.mark.parametrize(
    "bend",
    [
        lambda t: material(t).pop("tlogEntries"),
        lambda t: material(t).update(timestampVerificationData={}),
        lambda t: envelope(t)["signatures"][0].pop("keyid"),
        lambda t: envelope(t)["signatures"][0].update(keyid="any"),
    ],
)
def test_what_may_differ(bend: Bend) -> None:
    assert parse_bundle(bent(bend), "model.sig").payload == PAYLOAD


def test_a_bundle_may_name_no_key() -> None:
    assert parse_bundle(bent(lambda t: t["verificationMaterial"].update(publicKey={})), "model.sig").hint is None


@pytest.mark.parametrize(
    ("bend", "words"),
    [
        (lambda t: t.pop("mediaType"), "mediaType"),
        (lambda t: t.update(mediaType="application/json"), "mediaType"),
        (lambda t: t.update(mediaType=3), "mediaType"),
        (lambda t: t.update(extra=1), "extra"),
        (lambda t: t.pop("dsseEnvelope"), "dsseEnvelope"),
        (lambda t: t.pop("verificationMaterial"), "verificationMaterial"),
        (lambda t: t.update(messageSignature={}), "messageSignature"),
        (lambda t: t.update(verificationMaterial=[]), "verificationMaterial"),
        (lambda t: material(t).pop("publicKey"), "exactly one"),
        (lambda t: material(t).update(x509CertificateChain={"certificates": []}), "exactly one"),
        (lambda t: material(t).update(certificate={}), "exactly one"),
        (lambda t: material(t).update(public_key={}), "public_key"),
        (lambda t: material(t).update(publicKey=None), "publicKey"),
        (lambda t: material(t).update(publicKey={"hint": "A" * 64}), "hint"),
        (lambda t: material(t).update(publicKey={"hint": "a" * 63}), "hint"),
        (lambda t: material(t).update(publicKey={"hint": None}), "hint"),
        (lambda t: material(t).update(publicKey={"hint": ""}), "hint"),
        (lambda t: material(t).update(publicKey={"hint": 7}), "hint"),
        (lambda t: material(t).update(publicKey={"key": ""}), "key"),
        (lambda t: material(t).update(tlogEntries={}), "tlogEntries"),
        (lambda t: material(t).update(tlogEntries=None), "tlogEntries"),
        (lambda t: material(t).update(timestampVerificationData=[]), "timestampVerificationData"),
        (lambda t: material(t).update(timestampVerificationData=None), "timestampVerificationData"),
        (lambda t: t.update(dsseEnvelope="x"), "dsseEnvelope"),
        (lambda t: envelope(t).update(payloadType="application/json"), "payloadType"),
        (lambda t: envelope(t).update(payloadType=PAYLOAD_TYPE.upper()), "payloadType"),
        (lambda t: envelope(t).pop("payloadType"), "payloadType"),
        (lambda t: envelope(t).pop("payload"), "payload"),
        (lambda t: envelope(t).update(payload=""), "base64"),
        (lambda t: envelope(t).update(payload=[1]), "not a string"),
        (lambda t: envelope(t).update(signatures=[]), "0 signatures"),
        (lambda t: envelope(t).update(signatures=envelope(t)["signatures"] * 2), "2 signatures"),
        (lambda t: envelope(t).update(signatures={}), "exactly one"),
        (lambda t: envelope(t).update(signatures=[3]), "a signature"),
        (lambda t: envelope(t)["signatures"][0].pop("sig"), "sig"),
        (lambda t: envelope(t)["signatures"][0].update(sig="AAAA" * 2000), "too many"),
        (lambda t: envelope(t)["signatures"][0].update(keyid=1), "keyid"),
        (lambda t: envelope(t)["signatures"][0].update(cert=""), "cert"),
        (only_certificates({"rawBytes": "%%%"}), "base64"),
        (only_certificates("MA=="), "a certificate"),
        (only_certificates({"rawBytes": "MA==", "x": 1}), "unknown field"),
        (lambda t: t.update(verificationMaterial={"x509CertificateChain": {}}), "certificates"),
        (lambda t: t.update(verificationMaterial={"x509CertificateChain": {"certificates": {}}}), "list"),
    ],
)
def test_malformed_bundles(bend: Bend, words: str) -> None:
    with refusal(BundleError, "model.sig", words):
        parse_bundle(bent(bend), "model.sig")


@pytest.mark.parametrize("field", ["payload", "sig"])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[:10] + "\n" + text[10:],
        lambda text: text + "\n",
        lambda text: text + " ",
        lambda text: text.rstrip("=") if text.endswith("=") else text[:-1],
        lambda text: text + "====",
        lambda text: "-" + text[1:],
        lambda text: "_" + text[1:],
        lambda text: text + "A",
        lambda text: "é" + text[1:],
        lambda text: "MB==",
        lambda text: "MDB=",
        lambda text: "=",
        lambda text: "MA==MA==",
    ],
)
def test_base64_is_strict(field: str, spoil: Any) -> None:
    def bend(table: dict[str, Any]) -> None:
        place = envelope(table) if field == "payload" else envelope(table)["signatures"][0]
        place[field] = spoil(place[field])

    with refusal(BundleError, "base64"):
        parse_bundle(bent(bend), "model.sig")


@pytest.mark.parametrize(
    ("bend", "words"),
    [
        (lambda t: t.update(mediaType="application/vnd.dev.sigstore.bundle+json;version=0.3"), "version=0.3"),
        (lambda t: t.update(mediaType="application/vnd.dev.sigstore.bundle.v0.4+json"), "v0.4"),
        (lambda t: t.update(messageSignature=t.pop("dsseEnvelope")), "bare message"),
        (lambda t: t.update(verificationMaterial={"certificate": {"rawBytes": "MA=="}}), "keyless"),
        (lambda t: material(t).update(tlogEntries=[{}]), "tlogEntries"),
        (lambda t: material(t).update(timestampVerificationData={"rfc3161Timestamps": [1]}), "timestamp"),
        (lambda t: material(t).update(publicKey={"rawBytes": "MA==", "keyDetails": "X"}), "before model-signing 1.1"),
    ],
)
def test_bundles_of_other_kinds_are_unsupported(bend: Bend, words: str) -> None:
    with refusal(UnsupportedError, "model.sig", words):
        parse_bundle(bent(bend), "model.sig")


def test_certificates_are_decoded_and_counted() -> None:
    certificate = {"rawBytes": base64.b64encode(b"der").decode()}
    assert parse_bundle(bent(only_certificates(certificate)), "model.sig").certificates == (b"der",)
    with refusal(SignatureError, "empty"):
        parse_bundle(bent(only_certificates()), "model.sig")
    with refusal(SignatureError, "11 certificates"):
        parse_bundle(bent(only_certificates(*[certificate] * 11)), "model.sig")


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"


@pytest.mark.parametrize(
    ("raw", "error", "words"),
    [
        (b"", BundleError, "empty"),
        (LFS, LfsPointerError, "Git LFS pointer"),
        (b"<!DOCTYPE html>", BundleError, "strict JSON"),
        (b"\xef\xbb\xbf" + GOOD, BundleError, "BOM"),
        (GOOD + b"x", BundleError, "strict JSON"),
        (GOOD + GOOD, BundleError, "strict JSON"),
        (GOOD + b"\x00", BundleError, "strict JSON"),
        (GOOD[:-1], BundleError, "strict JSON"),
        (b"[" + GOOD + b"]", BundleError, "object"),
        (GOOD.replace(b'"keyid"', b'"sig"', 1), BundleError, "twice"),
        (GOOD.replace(b'"tlogEntries"', b'"publicKey"', 1), BundleError, "twice"),
        (GOOD.replace(b'"keyid":""', b'"keyid":NaN'), BundleError, "NaN"),
        (GOOD.replace(b'"keyid":""', b'"keyid":1e400'), BundleError, "keyid"),
        (GOOD.replace(b'"keyid":""', b'"keyid":9223372036854775808.0'), BundleError, "keyid"),
        (GOOD.replace(b'"keyid":""', b'"keyid":"\\ud800"'), BundleError, "surrogate"),
        (b"[" * 100_000, BundleError, "deep"),
        (GOOD.decode().encode("utf-16"), BundleError, "strict JSON"),
    ],
)
def test_what_is_no_bundle_at_all(raw: bytes, error: type[MemoptError], words: str) -> None:
    with refusal(error, "model.sig", words):
        parse_bundle(raw, "model.sig")


def test_the_size_is_capped_before_anything_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_module, "MAX_BUNDLE_SIZE_BYTES", len(GOOD) - 1)
    with refusal(BundleError, "at most"):
        parse_bundle(GOOD, "model.sig")


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_no_changed_byte_passes_as_the_same_bundle(position: int, change: int) -> None:
    raw = bytearray(GOOD)
    raw[position] ^= change
    with contextlib.suppress(MemoptError):
        assert parse_bundle(bytes(raw), "model.sig") != parse_bundle(GOOD, "model.sig")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400) | st.recursive(st.none() | st.text() | st.floats(), st.lists).map(repr).map(str.encode))
def test_bytes_never_give_a_traceback(raw: bytes) -> None:
    with pytest.raises(MemoptError):
        parse_bundle(raw, "model.sig")
