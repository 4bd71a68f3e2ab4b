"""Signers: the key in this process, and a command that stands for an HSM or a KMS."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path

import pytest
from refusals import refusal, within_seconds

from memopt.errors import MemoptIOError, SignatureError, UsageError
from memopt.manifests.keys import CURVES, generate_private_key, verify
from memopt.manifests.signer import CommandSigner, KeySigner, Signer

PAE = b"DSSEv1 4 test 5 hello"
OPENSSL_HASHES = {"p256": "-sha256", "p384": "-sha384", "p521": "-sha512"}


@pytest.mark.parametrize("curve", CURVES)
def test_a_key_signs(curve: str) -> None:
    key = generate_private_key(curve)
    signer: Signer = KeySigner(key)
    assert signer.public_key == key.public_key
    assert verify(key.public_key, signer.sign(PAE), PAE)
    assert signer.sign(PAE) == signer.sign(PAE)


@pytest.mark.parametrize("curve", CURVES)
def test_openssl_signs_as_a_command(tmp_path: Path, curve: str) -> None:
    key = generate_private_key(curve)
    path = tmp_path / "k.pem"
    path.write_bytes(key.to_pem(None))
    command = ["openssl", "dgst", OPENSSL_HASHES[curve], "-sign", str(path)]
    signer: Signer = CommandSigner(command, key.public_key)
    assert verify(key.public_key, signer.sign(PAE), PAE)


def shell(script: str, timeout_s: float = 20) -> CommandSigner:
    return CommandSigner(["sh", "-c", script], generate_private_key().public_key, timeout_s)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exit 7", "status 7"),
        ("kill -9 $$", "status -9"),
        ("true", "0 bytes"),
        ("cat", "raw DER"),
        ("echo MEUCIQ==", "base64"),
        ("head -c 70 /dev/zero | tr '\\0' 0", "70 bytes that are no signature"),
        ("cat /dev/zero", "more than 256 bytes"),
    ],
)
def test_what_a_command_may_not_do(script: str, words: str) -> None:
    with within_seconds(20), refusal(SignatureError, words):
        shell(script).sign(PAE)


def test_a_good_signature_of_a_failed_command_is_not_used(tmp_path: Path) -> None:
    key = generate_private_key()
    (tmp_path / "sig").write_bytes(key.sign(PAE))
    script = f"cat {shlex.quote(str(tmp_path / 'sig'))}"
    assert CommandSigner(["sh", "-c", script], key.public_key).sign(PAE)
    with refusal(SignatureError, "status 3"):
        CommandSigner(["sh", "-c", script + "; exit 3"], key.public_key).sign(PAE)


def test_a_signature_by_another_key_is_refused(tmp_path: Path) -> None:
    key = generate_private_key()
    (tmp_path / "sig").write_bytes(generate_private_key().sign(PAE))
    with refusal(SignatureError, "another key's", key.public_key.hint[:8]):
        CommandSigner(["cat", str(tmp_path / "sig")], key.public_key).sign(PAE)


@pytest.mark.parametrize("script", ["sleep 60", "exec >&-; sleep 60", "sleep 60 & wait", "sleep 60 & exit 0"])
def test_a_command_that_hangs_ends(script: str) -> None:
    start = time.monotonic()
    with within_seconds(10), refusal(MemoptIOError, "0.3 s"):
        shell(script, timeout_s=0.3).sign(PAE)
    assert time.monotonic() - start < 5


def test_a_large_input_that_nobody_reads_blocks_nothing() -> None:
    with within_seconds(10), refusal(SignatureError, "0 bytes"):
        shell("true").sign(b"x" * 10_000_000)


def test_the_input_arrives_whole() -> None:
    script = "import sys, hashlib; d = sys.stdin.buffer.read(); sys.exit(len(d) != 3000000)"
    with within_seconds(20), refusal(SignatureError, "0 bytes"):
        CommandSigner([sys.executable, "-c", script], generate_private_key().public_key).sign(b"x" * 3_000_000)


@pytest.mark.parametrize("argv", [[], ["/nonexistent/sign"], ["/"], ["a\x00b"]])
def test_a_command_that_cannot_start_is_a_wrong_call(argv: list[str]) -> None:
    with refusal(UsageError):
        CommandSigner(argv, generate_private_key().public_key).sign(PAE)
