"""Against the reference implementation of OMS, model-signing 1.1.1, in both directions."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest
from certificate_chains import DAY, Party, authority, intermediate, leaf
from cryptography.hazmat.primitives.asymmetric import ec
from refusals import refusal
from signed_statements import chain_bundle
from signing_keys import fixed_key

from memopt.errors import SignatureError
from memopt.manifests.bundle import PAYLOAD_TYPE, pae, parse_bundle, render_bundle
from memopt.manifests.keys import CURVES, PrivateKey, parse_private_key
from memopt.manifests.policy import TrustPolicy, policy_for_key
from memopt.manifests.statement import Resource, Statement, parse_statement, render_statement
from memopt.manifests.trust import check_signatures

# The reference needs pyOpenSSL, which it does not declare.

NOW = 1_800_000_000
FILES = {
    "config.json": b"{}",
    "model-00001-of-00001.safetensors": b"weights" * 1000,
    "empty": b"",
    "sub/b.bin": b"b",
    "sub-b.bin": b"c",
    "sub.c/d": b"d",
    "sub/deep er/é.txt": b"e",
    "Z": b"z",
}


def reference(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "model_signing", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def must(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with names that sort differently by text and by component, and with Git's files, which nobody signs."""
    folder = tmp_path / "model"
    for name, content in {**FILES, ".gitattributes": b"x", ".git/config": b"y"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def save(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path


def resources() -> list[Resource]:
    return [Resource(name, hashlib.sha256(content).hexdigest()) for name, content in FILES.items()]


def sign(key: PrivateKey) -> bytes:
    payload = render_statement("model", resources())
    return render_bundle(payload, key.sign(pae(PAYLOAD_TYPE, payload)), key.public_key)


def check(raw: bytes, policy: TrustPolicy, now: int = NOW) -> Statement:
    return check_signatures([("model.sig", raw)], policy, now).statement


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("place", ["inside", "outside"])
def test_the_references_signature_is_accepted(model: Path, tmp_path: Path, curve: str, place: str) -> None:
    key = fixed_key(5, curve)
    signature = (model if place == "inside" else tmp_path) / "model.sig"
    private = save(tmp_path / "key.pem", key.to_pem(None))
    must(reference("sign", "key", model, "--signature", signature, "--private_key", private))
    statement = check(signature.read_bytes(), policy_for_key(key.public_key))
    assert statement.digests() == {entry.name: entry.sha256 for entry in resources()}
    assert statement.root_digest == parse_statement(render_statement("model", resources())).root_digest
    assert [entry.name for entry in statement.resources] == sorted(FILES, key=PurePosixPath)
    assert parse_bundle(signature.read_bytes(), "model.sig").hint == key.public_key.hint
    with refusal(SignatureError):
        check(signature.read_bytes(), policy_for_key(fixed_key(6, curve).public_key))


@pytest.mark.parametrize("curve", CURVES)
def test_our_signature_is_accepted_by_the_reference(model: Path, tmp_path: Path, curve: str) -> None:
    key = fixed_key(5, curve)
    signature = save(model / "model.sig", sign(key))
    public = save(tmp_path / "key.pub", key.public_key.pem)
    arguments = ("verify", "key", model, "--signature", signature, "--public_key", public)
    must(reference(*arguments))
    (model / "config.json").write_bytes(b"{ }")
    assert reference(*arguments).returncode != 0


def test_further_signatures_do_not_disturb_the_reference(model: Path, tmp_path: Path) -> None:
    keys = [fixed_key(5), fixed_key(6, "p384")]
    names = ["model.sig", f"model.{keys[1].public_key.hint[:8]}.sig"]
    payload = render_statement("model", resources(), names)
    for key, name in zip(keys, names, strict=True):
        save(model / name, render_bundle(payload, key.sign(pae(PAYLOAD_TYPE, payload)), key.public_key))
    for key, name in zip(keys, names, strict=True):
        public = save(tmp_path / "key.pub", key.public_key.pem)
        must(reference("verify", "key", model, "--signature", model / name, "--public_key", public))


def certified(tmp_path: Path, **leaf_options: object) -> tuple[Party, Party, Party]:
    """Root, intermediate and leaf, with their files in the folder."""
    root = authority(start=NOW - 999 * DAY, end=NOW + 999 * DAY)
    middle = intermediate(root, start=NOW - 999 * DAY, end=NOW + 999 * DAY)
    signer = leaf(middle, key=ec.generate_private_key(ec.SECP384R1()), **leaf_options)
    for name, party in (("root", root), ("middle", middle), ("leaf", signer)):
        save(tmp_path / f"{name}.crt", party.pem)
    save(tmp_path / "leaf.key", signer.key_pem)
    return root, middle, signer


def trust(root: Party) -> TrustPolicy:
    return TrustPolicy(keys=(), certificate_roots=(root.der,))


def test_the_references_certificate_signature_is_accepted(model: Path, tmp_path: Path) -> None:
    root, _, signer = certified(tmp_path)
    signature = model / "model.sig"
    files = ["--private_key", tmp_path / "leaf.key", "--signing_certificate", tmp_path / "leaf.crt"]
    files += ["--certificate_chain", tmp_path / "middle.crt"]
    must(reference("sign", "certificate", model, "--signature", signature, *files))
    assert check(signature.read_bytes(), trust(root)).digests()["Z"] == hashlib.sha256(b"z").hexdigest()
    assert len(parse_bundle(signature.read_bytes(), "model.sig").certificates) == 2
    with refusal(SignatureError, "trusted root"):
        check(signature.read_bytes(), trust(authority("other")))
    with refusal(SignatureError, "valid from"):
        check(signature.read_bytes(), trust(root), now=NOW + 2 * DAY)
    assert signer.der == parse_bundle(signature.read_bytes(), "model.sig").certificates[0]


def test_our_certificate_bundle_is_accepted_by_the_reference(model: Path, tmp_path: Path) -> None:
    root, middle, signer = certified(tmp_path)
    key = parse_private_key(signer.key_pem, None)
    raw = chain_bundle(key, [signer.der, middle.der], render_statement("model", resources()))
    signature = save(model / "model.sig", raw)
    must(
        reference(
            "verify", "certificate", model, "--signature", signature, "--certificate_chain", tmp_path / "root.crt"
        )
    )
    assert check(raw, trust(root))


def test_an_expired_certificate_passes_the_reference_but_not_us(model: Path, tmp_path: Path) -> None:
    root, middle, signer = certified(tmp_path, start=NOW - 99 * DAY, end=NOW - 98 * DAY)
    key = parse_private_key(signer.key_pem, None)
    raw = chain_bundle(key, [signer.der, middle.der], render_statement("model", resources()))
    signature = save(model / "model.sig", raw)
    must(
        reference(
            "verify", "certificate", model, "--signature", signature, "--certificate_chain", tmp_path / "root.crt"
        )
    )
    with refusal(SignatureError, "valid from"):
        check(raw, trust(root))


def test_the_references_payload_differs_from_run_to_run_and_is_read_each_time(model: Path, tmp_path: Path) -> None:
    key = fixed_key(5)
    private = save(tmp_path / "key.pem", key.to_pem(None))
    signatures = []
    for number in range(2):
        signature = tmp_path / f"{number}.sig"
        must(reference("sign", "key", model, "--signature", signature, "--private_key", private))
        signatures.append(signature.read_bytes())
    statements = [check(raw, policy_for_key(key.public_key)) for raw in signatures]
    assert statements[0].digests() == statements[1].digests()
    assert statements[0].root_digest == statements[1].root_digest
