"""Key files: what is read, what is refused, and what a signature holds for."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal, within_seconds
from signing_keys import fixed_key

from memopt.errors import KeyFileError, MemoptError, UnsupportedError, UsageError
from memopt.manifests.keys import (
    CURVES,
    PrivateKey,
    generate_private_key,
    load_private_key,
    load_public_key,
    parse_private_key,
    verify,
)

KEY = fixed_key()
OTHERS = {
    "Ed25519": ed25519.Ed25519PrivateKey.generate(),
    "RSA": rsa.generate_private_key(65537, 2048),
    "secp256k1": ec.generate_private_key(ec.SECP256K1()),
    "DSA": dsa.generate_private_key(2048),
}


def save(path: Path, key: PrivateKey = KEY, passphrase: bytes | None = None, mode: int = 0o600) -> Path:
    path.write_bytes(key.to_pem(passphrase))
    path.chmod(mode)
    return path


@pytest.mark.parametrize("curve", CURVES)
def test_signatures_are_deterministic_and_hold_for_one_key_and_message(curve: str) -> None:
    key = generate_private_key(curve)
    signature = key.sign(b"message")
    assert signature == key.sign(b"message")
    assert verify(key.public_key, signature, b"message")
    assert not verify(key.public_key, signature, b"massage")
    assert not verify(generate_private_key(curve).public_key, signature, b"message")
    assert key.public_key.curve == curve


def test_rfc_6979_vectors() -> None:
    """RFC 6979, appendix A.2.5: P-256, SHA-256, message "sample"."""
    secret = 0xC9AFA9D845BA75166B5C215767B1D6934E50C3DB36E89B127B8A622B120F6721
    pem = ec.derive_private_key(secret, ec.SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    signature = parse_private_key(pem, None).sign(b"sample")
    assert "efd48b2aacb6a8fd1140dd9cd45e81d69d2c877b56aaf991c34d0ea84eaf3716" in signature.hex()
    assert "f7cb1c942d657c41d436c7a1b6e29f65f3e900dbb9aff4064dc4ab2f843acda8" in signature.hex()


def test_a_hash_of_another_curve_does_not_hold() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    public = load_public_key(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    assert not verify(public, key.sign(b"x", ec.ECDSA(hashes.SHA512())), b"x")
    assert verify(public, key.sign(b"x", ec.ECDSA(hashes.SHA256())), b"x")


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300))
def test_no_bytes_are_a_signature_or_a_traceback(junk: bytes) -> None:
    assert not verify(KEY.public_key, junk, b"message")


def test_every_flipped_bit_breaks_a_signature() -> None:
    signature = KEY.sign(b"message")
    for bit in range(len(signature) * 8):
        flipped = bytearray(signature)
        flipped[bit // 8] ^= 1 << bit % 8
        assert not verify(KEY.public_key, bytes(flipped), b"message")


def test_hint_and_spki_digest_are_of_the_pem_text_and_of_the_der() -> None:
    der = subprocess.run(
        ["openssl", "pkey", "-pubin", "-outform", "DER"], input=KEY.public_key.pem, capture_output=True, check=True
    ).stdout
    assert KEY.public_key.hint == hashlib.sha256(KEY.public_key.pem).hexdigest()
    assert KEY.public_key.pem.endswith(b"-----END PUBLIC KEY-----\n")
    assert KEY.public_key.spki_sha256 == hashlib.sha256(der).hexdigest()


def test_the_hint_does_not_depend_on_how_the_file_was_written() -> None:
    text = KEY.public_key.pem.decode()
    for variant in (text.rstrip(), text.replace("\n", "\r\n"), "\n\n" + text + "\n\n"):
        assert load_public_key(variant.encode()) == KEY.public_key
    assert load_public_key(text) == KEY.public_key


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("passphrase", [None, b"pass", "pässwörd-日本".encode(), b" \x00\xff", b"x" * 1023])
def test_round_trip_through_a_file(tmp_path: Path, curve: str, passphrase: bytes | None) -> None:
    key = generate_private_key(curve)
    loaded = load_private_key(save(tmp_path / "k.pem", key, passphrase), passphrase)
    assert loaded.public_key == key.public_key
    assert loaded.sign(b"x") == key.sign(b"x")


def test_openssl_reads_our_keys_and_we_read_its_keys(tmp_path: Path) -> None:
    ours = save(tmp_path / "ours.pem", passphrase=b"pass")
    subprocess.run(["openssl", "pkey", "-in", ours, "-passin", "pass:pass", "-noout"], check=True, capture_output=True)
    theirs = tmp_path / "theirs.pem"
    command = "openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-384 -aes256 -pass pass:geheim -out"
    subprocess.run(
        [*command.split(), theirs],
        check=True,
        capture_output=True,
    )
    theirs.chmod(0o600)
    assert load_private_key(theirs, b"geheim").public_key.curve == "p384"


@pytest.mark.parametrize(
    ("stored", "given_passphrase", "words"),
    [
        (b"right", None, "encrypted and no passphrase"),
        (b"right", b"wrong", "wrong passphrase"),
        ("schlüssel".encode(), "schlüssel".encode("latin-1"), "wrong passphrase"),
        (b"right", b"", "0 bytes"),
        (b"right", b"x" * 1024, "1,024 bytes"),
        (None, b"needless", "not encrypted"),
    ],
)
def test_passphrase_refusals(tmp_path: Path, stored: bytes | None, given_passphrase: bytes | None, words: str) -> None:
    path = save(tmp_path / "k.pem", passphrase=stored)
    with refusal(KeyFileError, "k.pem" if "bytes" not in words else "", words):
        load_private_key(path, given_passphrase)


def test_an_empty_passphrase_is_refused_at_writing() -> None:
    with refusal(KeyFileError, "0 bytes"):
        KEY.to_pem(b"")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o644, 0o777])
def test_a_key_that_others_can_reach_is_refused_unless_allowed(tmp_path: Path, mode: int) -> None:
    path = save(tmp_path / "k.pem", mode=mode)
    with refusal(KeyFileError, f"{mode:04o}", "chmod 600"):
        load_private_key(path, None)
    assert load_private_key(path, None, allow_open_mode=True).public_key == KEY.public_key


def test_a_mounted_secret_is_a_link_and_is_followed(tmp_path: Path) -> None:
    save(tmp_path / "real.pem")
    (tmp_path / "link.pem").symlink_to("real.pem")
    assert load_private_key(tmp_path / "link.pem", None).public_key == KEY.public_key


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with within_seconds(5):
        for path, words in (("fifo", "regular"), ("none", "no such"), (".", "regular")):
            with refusal(KeyFileError, words):
                load_private_key(tmp_path / path, None)
            with refusal(KeyFileError, words):
                load_public_key(tmp_path / path)


@pytest.mark.parametrize("name", OTHERS)
def test_other_kinds_of_keys_are_unsupported(tmp_path: Path, name: str) -> None:
    key = OTHERS[name]
    with refusal(UnsupportedError, name):
        load_public_key(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    path = tmp_path / "k.pem"
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    path.chmod(0o600)
    with refusal(UnsupportedError, name):
        load_private_key(path, None)


def _private(form: PrivateFormat, encryption: object = None) -> bytes:
    return load_pem_private_key(KEY.to_pem(None), None).private_bytes(Encoding.PEM, form, encryption or NoEncryption())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not PEM"),
        (b"junk", "not PEM"),
        (b"\x30\x82" * 10, "not PEM"),
        (b"x" * 20_000, "16,384"),
        (KEY.public_key.pem, "not a private key"),
        (_private(PrivateFormat.TraditionalOpenSSL), "openssl pkcs8"),
        (_private(PrivateFormat.TraditionalOpenSSL, BestAvailableEncryption(b"x")), "openssl pkcs8"),
        (_private(PrivateFormat.OpenSSH), "openssl pkcs8"),
        (KEY.to_pem(None) + KEY.public_key.pem, "more than one"),
        (KEY.to_pem(None) + b"trailing", "more than one"),
        (KEY.to_pem(None)[:80], "more than one"),
        (KEY.to_pem(None).replace(b"M", b"N", 1), "damaged"),
        (b"-----BEGIN PRIVATE KEY-----\n!!!!\n-----END PRIVATE KEY-----\n", "damaged"),
        (b"-----BEGIN PRIVATE KEY-----\n-----END PRIVATE KEY-----\n", "damaged"),
    ],
    ids=range(14),
)
def test_what_is_no_private_key(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "k.pem"
    path.write_bytes(content)
    path.chmod(0o600)
    with refusal(KeyFileError, "k.pem", words):
        load_private_key(path, None)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (KEY.to_pem(None), ".pub file"),
        (KEY.public_key.pem * 2, "more than one"),
        (KEY.public_key.pem.replace(b"M", b"N", 1), "damaged"),
        (b"-----BEGIN CERTIFICATE-----\nMA==\n-----END CERTIFICATE-----\n", "CERTIFICATE"),
        (b"-----BEGIN \xff-----\nMA==\n-----END \xff-----\n", "not a public key"),
    ],
)
def test_what_is_no_public_key(content: bytes, words: str) -> None:
    with refusal(KeyFileError, words):
        load_public_key(content)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(KEY.public_key.pem) - 1), st.integers(1, 255))
def test_a_changed_public_key_is_another_key_or_refused(position: int, change: int) -> None:
    raw = bytearray(KEY.public_key.pem)
    raw[position] ^= change
    with contextlib.suppress(MemoptError):
        assert load_public_key(bytes(raw)).hint != KEY.public_key.hint or raw.split() == KEY.public_key.pem.split()


def test_secrets_show_in_no_text() -> None:
    secret = "".join(KEY.to_pem(None).decode().split("\n")[1:-2])
    assert secret[:40] not in repr(KEY) + str(KEY)
    assert "EllipticCurvePrivateKey" not in repr(KEY)


def test_an_unknown_curve_is_a_wrong_call() -> None:
    with refusal(UsageError, "p224"):
        generate_private_key("p224")
