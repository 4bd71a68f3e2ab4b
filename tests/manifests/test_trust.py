"""Signatures against a policy: who counts, who does not, and what is refused (rows 24-30, 38, 39)."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
from certificate_chains import DAY, NOW, Party, authority, intermediate, leaf
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal
from signed_statements import bundle_of, chain_bundle, payload_of, resources
from signing_keys import fixed_key

from memopt.errors import BundleError, FileNameError, MemoptError, PolicyError, SignatureError, UnsupportedError
from memopt.manifests.bundle import PAYLOAD_TYPE, legacy_pae, pae, render_bundle
from memopt.manifests.keys import CURVES, PrivateKey, parse_private_key
from memopt.manifests.policy import TrustedKey, TrustPolicy, policy_for_key
from memopt.manifests.statement import parse_statement, render_statement
from memopt.manifests.trust import Trusted, check_signatures

FIRST, SECOND, THIRD = fixed_key(1), fixed_key(2), fixed_key(3)
PAYLOAD = payload_of("config.json", "model.safetensors")
STATEMENT = parse_statement(PAYLOAD)


def policy_of(*keys: PrivateKey, **fields: Any) -> TrustPolicy:
    return TrustPolicy(keys=tuple(TrustedKey(key.public_key) for key in keys), **fields)


def check(policy: TrustPolicy, *bundles: bytes, now: int = NOW) -> Trusted:
    names = ["model.sig", *(f"model.{number:08x}.sig" for number in range(len(bundles)))]
    return check_signatures(list(zip(names, bundles, strict=False)), policy, now)


def by(key: PrivateKey, payload: bytes = PAYLOAD, **options: Any) -> bytes:
    return bundle_of(key, payload, **options)


@pytest.mark.parametrize("curve", CURVES)
def test_a_signature_by_the_trusted_key_holds(curve: str) -> None:
    key = fixed_key(4, curve)
    assert check(policy_for_key(key.public_key), by(key)) == Trusted(
        STATEMENT, STATEMENT.root_digest, (key.public_key,)
    )


def without_hint(table: dict[str, Any]) -> None:
    table["verificationMaterial"]["publicKey"] = {}


def with_hint(key: PrivateKey) -> Any:
    return lambda table: table["verificationMaterial"]["publicKey"].update(hint=key.public_key.hint)


def test_a_bundle_without_a_hint_is_tried_with_every_key() -> None:
    raw = by(SECOND, bend=without_hint)
    assert check(policy_of(FIRST, SECOND), raw).signers == (SECOND.public_key,)
    with refusal(SignatureError, "no trusted key"):
        check(policy_of(FIRST), raw)


def test_no_signature_at_all() -> None:
    with refusal(SignatureError, "missing", "model.sig"):
        check_signatures([], policy_of(FIRST), NOW)
    with refusal(SignatureError, "17 signature files"):
        check_signatures([("model.sig", by(FIRST))] * 17, policy_of(FIRST), NOW)


def test_another_key_is_refused_and_named() -> None:
    with refusal(SignatureError, SECOND.public_key.hint[:8], FIRST.public_key.hint[:8]):
        check(policy_of(FIRST), by(SECOND))


def test_the_right_hint_and_a_wrong_key() -> None:
    with refusal(SignatureError, "does not hold", FIRST.public_key.hint[:8]):
        check(policy_of(FIRST), by(SECOND, bend=with_hint(FIRST)))
    with refusal(SignatureError, "signed it"):
        check(policy_of(FIRST), by(FIRST, bend=with_hint(SECOND)))
    with refusal(SignatureError, "signed it"):
        check(policy_of(FIRST, SECOND), by(FIRST, bend=with_hint(SECOND)))


def test_a_changed_payload_is_refused_before_it_is_read() -> None:
    def bend(table: dict[str, Any]) -> None:
        table["dsseEnvelope"]["payload"] = "AAAA"

    with refusal(SignatureError, "does not hold"):
        check(policy_of(FIRST), by(FIRST, bend=bend))


def test_a_signature_over_another_payload_type_relabelled() -> None:
    with refusal(SignatureError, "does not hold"):
        check(policy_of(FIRST), by(FIRST, signed_type="application/json"))


def test_a_p256_key_with_a_sha512_signature() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    public = policy_for_key(_private(key).public_key)
    message = pae(PAYLOAD_TYPE, PAYLOAD)
    for digest, holds in ((hashes.SHA256(), True), (hashes.SHA512(), False)):
        raw = render_bundle(PAYLOAD, key.sign(message, ec.ECDSA(digest)), _private(key).public_key)
        with contextlib.nullcontext() if holds else refusal(SignatureError, "does not hold"):
            check(public, raw)


def _private(key: Any) -> PrivateKey:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return parse_private_key(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), None)


def test_the_encoding_of_model_signing_0_2_is_named_and_refused() -> None:
    raw = render_bundle(PAYLOAD, FIRST.sign(legacy_pae(PAYLOAD_TYPE, PAYLOAD)), FIRST.public_key)
    with refusal(UnsupportedError, "model.sig", "0.2"):
        check(policy_of(FIRST), raw)


@pytest.mark.parametrize(
    ("bend", "error"),
    [
        (lambda t: t.update(predicateType="https://slsa.dev/provenance/v1"), BundleError),
        (lambda t: t.update(predicateType="https://model_signing/Digests/v0.1"), UnsupportedError),
        (lambda t: t["predicate"]["resources"][0].update(name="../x"), FileNameError),
        (lambda t: t["predicate"]["serialization"].update(ignore_paths=["weights"]), PolicyError),
    ],
)
def test_what_a_trusted_key_signed_is_still_checked(bend: Any, error: type[MemoptError]) -> None:
    with refusal(error):
        check(policy_of(FIRST), by(FIRST, payload_of(bend=bend)))


def test_what_an_unknown_key_signed_is_not_even_read() -> None:
    hostile = by(SECOND, b"not a statement")
    with refusal(SignatureError, SECOND.public_key.hint[:8]):
        check(policy_of(FIRST), hostile)
    assert check(policy_of(FIRST), by(FIRST), hostile).signers == (FIRST.public_key,)


def test_a_threshold_needs_as_many_keys() -> None:
    two = policy_of(FIRST, SECOND, threshold=2)
    assert check(two, by(FIRST), by(SECOND)).signers == (FIRST.public_key, SECOND.public_key)
    for bundles in ([by(FIRST)], [by(FIRST), by(FIRST)], [by(FIRST), by(THIRD)]):
        with refusal(SignatureError, "1 distinct trusted keys", "2 are needed"):
            check(two, *bundles)


def test_one_key_counts_once_however_it_is_listed() -> None:
    root = authority()
    twice = TrustPolicy(
        keys=(TrustedKey(FIRST.public_key), TrustedKey(FIRST.public_key, identities=("a",))), threshold=2
    )
    with refusal(SignatureError, "1 distinct", "only 1 distinct keys"):
        check(twice, by(FIRST), by(FIRST, bend=without_hint))
    signer = leaf(root)
    both = replace(policy_for_key(_private(signer.key).public_key), certificate_roots=(root.der,), threshold=2)
    with refusal(SignatureError, "1 distinct"):
        check(both, by(_private(signer.key)), chain_bundle(_private(signer.key), [signer.der], PAYLOAD))


def test_both_signatures_must_be_over_the_same_files() -> None:
    two = policy_of(FIRST, SECOND, threshold=2)
    other = payload_of("config.json", "other.safetensors")
    with refusal(BundleError, "other files", "model.00000000.sig"):
        check(two, by(FIRST), by(SECOND, other))
    # Even when one signature would have been enough.
    with refusal(BundleError, "other files"):
        check(policy_of(FIRST, SECOND), by(FIRST), by(SECOND, other))
    same = render_statement("another name", resources("model.safetensors", "config.json"), ["model.sig"])
    assert len(check(two, by(FIRST), by(SECOND, same)).signers) == 2


def test_a_damaged_second_signature_is_refused_even_if_one_is_enough() -> None:
    for spoiled in (by(SECOND, bend=with_hint(FIRST)), by(FIRST, bend=with_hint(SECOND)), b"", b"junk"):
        with pytest.raises((SignatureError, BundleError)):
            check(policy_of(FIRST, SECOND), by(FIRST), spoiled)


@pytest.mark.parametrize("name", ["hint", "spki_sha256"])
def test_a_revoked_key_is_the_policys_refusal(name: str) -> None:
    revoked = frozenset([getattr(FIRST.public_key, name)])
    with refusal(PolicyError, "revoked", FIRST.public_key.hint[:8]):
        check(policy_of(FIRST, revoked_keys=revoked), by(FIRST))
    assert check(policy_of(FIRST, SECOND, revoked_keys=revoked), by(FIRST), by(SECOND)).signers == (SECOND.public_key,)
    with refusal(PolicyError, "1 of 2", "revoked"):
        check(policy_of(FIRST, SECOND, threshold=2, revoked_keys=revoked), by(FIRST), by(SECOND))
    with refusal(SignatureError):
        check(policy_of(SECOND, revoked_keys=revoked), by(FIRST))


def test_a_key_outside_its_time_is_the_policys_refusal() -> None:
    policy = TrustPolicy(keys=(TrustedKey(FIRST.public_key, NOW - 5, NOW + 5),))
    assert check(policy, by(FIRST), now=NOW + 5)
    for now, words in ((NOW - 6, "valid from"), (NOW + 6, "valid until")):
        with refusal(PolicyError, words):
            check(policy, by(FIRST), now=now)


ROOT = authority()
MIDDLE = intermediate(ROOT)
SIGNER = leaf(MIDDLE)
CHAIN = [SIGNER.der, MIDDLE.der]


def certified(*roots: Party, **fields: Any) -> TrustPolicy:
    return TrustPolicy(keys=(), certificate_roots=tuple(root.der for root in roots), **fields)


def test_a_certificate_of_a_trusted_root_signs() -> None:
    key = _private(SIGNER.key)
    assert check(certified(ROOT), chain_bundle(key, CHAIN, PAYLOAD)).signers == (key.public_key,)


def test_certificates_that_do_not_count() -> None:
    key = _private(SIGNER.key)
    raw = chain_bundle(key, CHAIN, PAYLOAD)
    with refusal(SignatureError, "no certificate roots"):
        check(policy_of(FIRST), raw)
    with refusal(SignatureError, "trusted root"):
        check(certified(authority("other")), raw)
    with refusal(SignatureError, "valid from"):
        check(certified(ROOT), raw, now=NOW + 3 * DAY)
    with refusal(SignatureError, "from the policy"):
        check(certified(ROOT), chain_bundle(key, [*CHAIN, ROOT.der], PAYLOAD))
    with refusal(SignatureError, "does not hold for its certificate"):
        check(certified(ROOT), chain_bundle(FIRST, CHAIN, PAYLOAD))
    assert check(policy_of(FIRST), by(FIRST), raw).signers == (FIRST.public_key,)


def test_a_revoked_key_anywhere_in_a_chain_counts() -> None:
    key = _private(SIGNER.key)
    for digest in (key.public_key.hint, key.public_key.spki_sha256, _private(MIDDLE.key).public_key.spki_sha256):
        with refusal(PolicyError, "revoked"):
            check(certified(ROOT, revoked_keys=frozenset([digest])), chain_bundle(key, CHAIN, PAYLOAD))


GOOD = by(FIRST)


@settings(max_examples=400, deadline=None)
@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_no_changed_byte_of_a_bundle_is_accepted(position: int, change: int) -> None:
    raw = bytearray(GOOD)
    raw[position] ^= change
    with pytest.raises(MemoptError):
        check(policy_of(FIRST, SECOND), bytes(raw))


def test_no_field_of_a_bundle_can_be_moved_to_another() -> None:
    one, other = json.loads(by(FIRST)), json.loads(by(SECOND, payload_of("other")))
    for path in (["dsseEnvelope", "payload"], ["dsseEnvelope", "signatures"], ["verificationMaterial"]):
        mixed = json.loads(json.dumps(one))
        source, place = other, mixed
        for step in path[:-1]:
            source, place = source[step], place[step]
        place[path[-1]] = source[path[-1]]
        with refusal(SignatureError):
            check(policy_of(FIRST, SECOND), json.dumps(mixed).encode())
