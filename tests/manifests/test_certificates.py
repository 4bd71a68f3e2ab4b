"""Certificate chains: what holds, and every way in which one may not (row 39)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from certificate_chains import DAY, NOW, SERVER_AUTH, Party, authority, intermediate, issue, leaf, usage
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, ObjectIdentifier
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal

from memopt.errors import MemoptError, PolicyFileError, SignatureError, UnsupportedError
from memopt.manifests.certificates import certificate_from_pem, chain_key_digests, check_chain
from memopt.manifests.keys import load_public_key

ROOT = authority()
MIDDLE = intermediate(ROOT)
LEAF = leaf(MIDDLE)


def ders(*parties: Party) -> tuple[bytes, ...]:
    return tuple(party.der for party in parties)


def check(*chain: Party, roots: tuple[Party, ...] = (ROOT,), now: int = NOW) -> object:
    return check_chain(ders(*chain), ders(*roots), now)


def public_key(party: Party) -> object:
    return load_public_key(party.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


def test_a_good_chain_gives_the_leafs_key() -> None:
    key = public_key(LEAF)
    assert check(LEAF, MIDDLE) == key
    assert check(LEAF, MIDDLE, roots=(authority("other"), ROOT)) == key
    # An anchor need not be self-signed: the operator may trust the intermediate alone.
    assert check(LEAF, roots=(MIDDLE,)) == key


@pytest.mark.parametrize("curve", [ec.SECP384R1, ec.SECP521R1])
def test_other_curves_and_short_chains(curve: type[ec.EllipticCurve]) -> None:
    party = leaf(ROOT, key=ec.generate_private_key(curve()))
    assert check(party) == public_key(party)


def test_an_rsa_authority_is_common_and_allowed() -> None:
    root = authority(key=rsa.generate_private_key(65537, 2048))
    assert check(leaf(root), roots=(root,))


@pytest.mark.parametrize("size", [1024, 224], ids=["RSA", "EC"])
def test_a_weak_authority_is_refused(size: int) -> None:
    key = rsa.generate_private_key(65537, size) if size == 1024 else ec.generate_private_key(ec.SECP224R1())
    weak = authority(key=key)
    with refusal(SignatureError, "weak"):
        check(leaf(weak), roots=(weak,))


@pytest.mark.parametrize(
    "options",
    [{"key_usage": None}, {"purposes": None}, {"ca": None}, {"end": NOW}, {"start": NOW}],
    ids=["no key usage", "no purposes", "no constraints", "last second", "first second"],
)
def test_what_a_leaf_may_lack(options: dict) -> None:
    assert check(leaf(ROOT, **options))


def test_a_renewed_root_of_the_same_name_and_key_is_found() -> None:
    expired = authority(key=ROOT.key, end=NOW - 1, start=NOW - 9 * DAY)
    assert check(LEAF, MIDDLE, roots=(expired, ROOT))
    with refusal(SignatureError, "valid from"):
        check(LEAF, MIDDLE, roots=(expired,))


BAD_LEAVES: list[tuple[dict, str]] = [
    ({"start": NOW - 9 * DAY, "end": NOW - 1}, "valid from"),
    ({"start": NOW + 1}, "valid from"),
    ({"ca": True}, "of an authority"),
    ({"purposes": [SERVER_AUTH]}, "code signing"),
    ({"purposes": [ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE]}, "code signing"),
    ({"key_usage": usage("key_encipherment")}, "key usage"),
    ({"key_usage": usage("key_cert_sign")}, "key usage"),
    ({"key_usage": None, "purposes": None}, "does not say"),
    ({"extra": x509.UnrecognizedExtension(ObjectIdentifier("1.2.3.4"), b"\x05\x00")}, "1.2.3.4"),
]


@pytest.mark.parametrize(("options", "words"), BAD_LEAVES)
def test_leaves_that_may_not_sign(options: dict, words: str) -> None:
    with refusal(SignatureError, "signer", words):
        check(leaf(MIDDLE, **options), MIDDLE)


BAD_MIDDLES: list[tuple[dict, str]] = [
    ({"ca": False}, "not of an authority"),
    ({"ca": None}, "not of an authority"),
    ({"start": NOW - 9 * DAY, "end": NOW - 1}, "valid from"),
    ({"start": NOW + 1}, "valid from"),
    ({"key_usage": usage("digital_signature")}, "may not sign certificates"),
    ({"purposes": [SERVER_AUTH]}, "extended key usage"),
    ({"extra": x509.NameConstraints([x509.DNSName("x.org")], None)}, "2.5.29.30"),
]


@pytest.mark.parametrize(("options", "words"), BAD_MIDDLES)
def test_authorities_that_may_not_issue(options: dict, words: str) -> None:
    middle = intermediate(ROOT, **options)
    with refusal(SignatureError, "middle", words):
        check(leaf(middle), middle)


@pytest.mark.parametrize(("options", "words"), BAD_MIDDLES)
def test_roots_must_hold_too(options: dict, words: str) -> None:
    root = authority(**options)
    with refusal(SignatureError, "root", words):
        check(leaf(root), roots=(root,))


def test_path_lengths() -> None:
    root = authority(path_length=1)
    first = intermediate(root, "first")
    second = intermediate(first, "second")
    assert check(leaf(first), first, roots=(root,))
    with refusal(SignatureError, "too long", "root"):
        check(leaf(second), second, first, roots=(root,))
    last = intermediate(ROOT, "last", path_length=0)
    below = intermediate(last, "below")
    assert check(leaf(last), last)
    with refusal(SignatureError, "too long", "last"):
        check(leaf(below), below, last)


def chain_of(length: int) -> list[Party]:
    chain = [ROOT]
    for number in range(length - 1):
        chain.insert(0, intermediate(chain[0], f"number {number}"))
    return [leaf(chain[0]), *chain[:-1]]


def test_the_number_of_certificates_is_bounded() -> None:
    assert check(*chain_of(10))
    with refusal(SignatureError, "11 certificates"):
        check(*chain_of(11))


@pytest.mark.parametrize(
    ("chain", "words"),
    [
        (lambda: (), "empty"),
        (lambda: (LEAF, MIDDLE, ROOT), "from the policy"),
        (lambda: (LEAF,), "trusted root"),
        (lambda: (MIDDLE,), "of an authority"),
        (lambda: (MIDDLE, LEAF), "of an authority"),
        (lambda: (LEAF, MIDDLE, MIDDLE), "not issued by"),
        (lambda: (LEAF, intermediate(ROOT)), "not issued by"),
        (lambda: (leaf(intermediate(authority("root"))), MIDDLE), "not issued by"),
        (lambda: (leaf(authority("root")),), "trusted root"),
        (lambda: (leaf(authority("stranger")),), "trusted root"),
        (lambda: (issue("selfmade", key_usage=usage("digital_signature")),), "from the policy"),
        (lambda: (leaf(ROOT, digest=hashes.SHA224()),), "weak"),
    ],
)
def test_chains_that_lead_nowhere(chain: Callable[[], tuple[Party, ...]], words: str) -> None:
    with refusal(SignatureError, words):
        check(*chain())


def test_no_roots_trust_nobody() -> None:
    with refusal(SignatureError, "trusted root"):
        check(LEAF, MIDDLE, roots=())


@pytest.mark.parametrize(
    "key",
    [
        ed25519.Ed25519PrivateKey.generate(),
        rsa.generate_private_key(65537, 2048),
        ec.generate_private_key(ec.SECP256K1()),
    ],
    ids=["ed25519", "rsa", "secp256k1"],
)
def test_leaf_keys_of_other_kinds_are_unsupported(key: object) -> None:
    with refusal(UnsupportedError, "P-256"):
        check(leaf(ROOT, key=key))


def test_an_expired_certificate_stays_expired_whatever_its_own_time() -> None:
    """model-signing 1.1.1 sets the clock to the leaf's notBefore and accepts this."""
    old = leaf(ROOT, start=NOW - 9 * DAY, end=NOW - 8 * DAY)
    assert check(old, roots=(authority(key=ROOT.key, start=NOW - 99 * DAY),), now=NOW - 9 * DAY)
    with refusal(SignatureError, "valid from"):
        check(old)


@pytest.mark.parametrize("now", [0, -1, 2**53, 10**30])
def test_a_clock_that_is_wrong(now: int) -> None:
    with pytest.raises(SignatureError):
        check(LEAF, MIDDLE, now=now)


def test_every_key_of_a_chain_has_a_digest_for_revocation() -> None:
    digests = chain_key_digests(ders(LEAF, MIDDLE))
    assert digests[0] == public_key(LEAF).spki_sha256
    assert len(set(digests)) == 2


@pytest.mark.parametrize("pem", [b"", b"junk", ROOT.pem + MIDDLE.pem, ROOT.pem[:99], ROOT.key_pem], ids=range(5))
def test_a_root_is_one_certificate(pem: bytes) -> None:
    with refusal(PolicyFileError, "trust.json", "certificate root"):
        certificate_from_pem(pem, "trust.json")


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
@pytest.mark.parametrize("place", [0, 1], ids=["leaf", "intermediate"])
def test_no_flipped_bit_of_a_chain_passes(place: int) -> None:
    for position in range(len((LEAF, MIDDLE)[place].der)):
        chain = [bytearray(LEAF.der), bytearray(MIDDLE.der)]
        chain[place][position] ^= 1 << position % 8
        with pytest.raises(MemoptError):
            check_chain(tuple(map(bytes, chain)), (ROOT.der,), NOW)


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
def test_no_flipped_bit_of_a_root_gives_a_traceback() -> None:
    for position in range(len(ROOT.der)):
        raw = bytearray(ROOT.der)
        raw[position] ^= 1 << position % 8
        with contextlib.suppress(MemoptError):
            check_chain((LEAF.der, MIDDLE.der), (bytes(raw),), NOW)


def test_the_unsigned_count_of_unused_bits_is_zero() -> None:
    party = leaf(ROOT)
    while party.certificate.signature[-1] & 1:
        party = leaf(ROOT)
    assert check(party)
    raw = bytearray(party.der)
    raw[-len(party.certificate.signature) - 1] = 1
    with refusal(SignatureError, "malformed"):
        check_chain((bytes(raw),), (ROOT.der,), NOW)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=100), max_size=3))
def test_bytes_never_give_a_traceback(chain: list[bytes]) -> None:
    with pytest.raises(SignatureError):
        check_chain(tuple(chain), (ROOT.der,), NOW)
