"""Rows 13 and 20 to 39: signatures, statements, manifests, names in them, keys, certificates and policies."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from certificate_chains import CODE_SIGNING, DAY, SERVER_AUTH, Party, authority, intermediate, leaf, usage
from certificate_chains import NOW as CHAIN_NOW
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from release_files import policy_json
from signed_statements import bundle_of, chain_bundle
from signing_keys import fixed_key
from tiny_releases import CREATED, IDENTITY, KEY, sign, sign_anyway, write_release, write_signatures

from faults.hostile_case import Case
from memopt.manifests.bundle import PAYLOAD_TYPE, legacy_pae, pae, parse_bundle, render_bundle
from memopt.manifests.digest import is_hex_digest
from memopt.manifests.file_names import CHUNKS_NAME, MANIFEST_NAME, SIGNATURE_NAME, SUMS_NAME
from memopt.manifests.manifest import Manifest, render_manifest
from memopt.manifests.statement import LEGACY_PREDICATE_TYPE, PREDICATE_TYPE

OTHER = fixed_key(2)
Bend = Callable[[bytes], bytes]


def payload_in(folder: Path) -> bytes:
    """The statement that the folder's signature signs."""
    return parse_bundle((folder / SIGNATURE_NAME).read_bytes(), SIGNATURE_NAME).payload


def _policy(**fields: object) -> Callable[[Path], str]:
    return lambda _folder: policy_json(**fields)  # type: ignore[arg-type]


def _signature(make: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Replace model.sig by what `make` makes of the signed payload."""
    return lambda folder: (folder / SIGNATURE_NAME).write_bytes(make(payload_in(folder))) and None


def _raw_signature(bend: Bend) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        path = folder / SIGNATURE_NAME
        path.write_bytes(bend(path.read_bytes()))

    return make


def _replaced(old: str, new: str) -> Bend:
    def bend(raw: bytes) -> bytes:
        assert old.encode() in raw, old
        return raw.replace(old.encode(), new.encode(), 1)

    return bend


def _statement(bend: Callable[[dict[str, Any]], Any], *, fix_root: bool = True) -> Callable[[Path], None]:
    """Sign a changed statement; its root digest is made to fit unless that is the point."""

    def make(folder: Path) -> None:
        table = json.loads(payload_in(folder))
        bend(table)
        if fix_root:
            digests = [entry["digest"] for entry in table["predicate"]["resources"]]
            raw = b"".join(bytes.fromhex(digest) for digest in digests if is_hex_digest(digest))
            table["subject"][0]["digest"]["sha256"] = hashlib.sha256(raw).hexdigest()
        write_signatures(folder, json.dumps(table).encode())

    return make


def _payload(bend: Bend) -> Callable[[Path], None]:
    return lambda folder: write_signatures(folder, bend(payload_in(folder)))


def _manifest(bend: Callable[[Manifest], Manifest | bytes]) -> Callable[[Path], None]:
    return lambda folder: sign_anyway(folder, bend_manifest=bend) and None


def _manifest_text(bend: Bend) -> Callable[[Path], None]:
    return _manifest(lambda manifest: bend(render_manifest(manifest)))


def _first_file(**fields: object) -> Callable[[Path], None]:
    """The manifest says something else about its first file."""

    def bend(manifest: Manifest) -> Manifest:
        first = dataclasses.replace(manifest.files[0], **fields)  # type: ignore[arg-type]
        return dataclasses.replace(manifest, files=(first, *manifest.files[1:]))

    return _manifest(bend)


def _resource(**fields: object) -> Callable[[Path], None]:
    return _statement(lambda table: table["predicate"]["resources"][0].update(fields))


def _ignore(*paths: str) -> Callable[[Path], None]:
    return _statement(lambda table: table["predicate"]["serialization"].update(ignore_paths=list(paths)))


def _signed(*keys: object, **options: Any) -> Callable[[Path], None]:
    return lambda folder: sign(folder, *keys, **options) and None  # type: ignore[arg-type]


def _transplant(folder: Path) -> None:
    """Manifest and signature of another release, validly signed, over this one's files."""
    other = folder.parent / "other"
    write_release(other)
    sign(other, identity="acme/other")
    for name in (SIGNATURE_NAME, MANIFEST_NAME, CHUNKS_NAME, SUMS_NAME):
        shutil.copy(other / name, folder / name)


def _by_another_key_with_our_hint(payload: bytes) -> bytes:
    return render_bundle(payload, OTHER.sign(pae(PAYLOAD_TYPE, payload)), KEY.public_key)


def _over_other_bytes(payload: bytes) -> bytes:
    return render_bundle(payload + b" ", KEY.sign(pae(PAYLOAD_TYPE, payload)), KEY.public_key)


def _sha512(payload: bytes) -> bytes:
    private = ec.derive_private_key(0x1234567890ABCDEF1234567890ABCDEF + 7, ec.SECP256R1())
    signature = private.sign(pae(PAYLOAD_TYPE, payload), ec.ECDSA(hashes.SHA512()))
    return render_bundle(payload, signature, KEY.public_key)


def _legacy_pae(payload: bytes) -> bytes:
    return render_bundle(payload, KEY.sign(legacy_pae(PAYLOAD_TYPE, payload)), KEY.public_key)


def _public_pem(key: Any) -> str:
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


_FOREIGN_KEYS = {
    "Ed25519": lambda: ed25519.Ed25519PrivateKey.generate().public_key(),
    "RSA": lambda: rsa.generate_private_key(65537, 2048).public_key(),
    "secp256k1": lambda: ec.generate_private_key(ec.SECP256K1()).public_key(),
}


def _foreign_policy(make_key: Callable[[], Any]) -> Callable[[Path], str]:
    return lambda _folder: json.dumps({"schema": "memopt.trust/1", "keys": [{"pem": _public_pem(make_key())}]})


def _twice(folder: Path) -> None:
    """The same signature under two names."""
    shutil.copy(folder / SIGNATURE_NAME, folder / f"model.{'0' * 8}.sig")


def _two_keys_in_policy(_folder: Path) -> str:
    entries = [{"pem": KEY.public_key.pem.decode()}, {"pem": KEY.public_key.pem.decode().replace("\n", "\r\n")}]
    return json.dumps({"schema": "memopt.trust/1", "keys": entries, "threshold": 2})


def _both_keys(_folder: Path) -> str:
    return policy_json(KEY, OTHER, threshold=2)


def _remove_signature(folder: Path) -> None:
    (folder / SIGNATURE_NAME).unlink()


def _signature_folder(folder: Path) -> None:
    _remove_signature(folder)
    (folder / SIGNATURE_NAME).mkdir()


_LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32 + b"\nsize 3000\n"


def _padded_base64(bend: Callable[[str], str], field: str = "payload") -> Callable[[Path], None]:
    """Bend the base64 text of a bundle whose payload needs two padding characters."""

    def make(folder: Path) -> None:
        payload = payload_in(folder)
        payload += b" " * ((1 - len(payload)) % 3)
        table = json.loads(bundle_of(KEY, payload))
        envelope = table["dsseEnvelope"]
        place = envelope if field == "payload" else envelope["signatures"][0]
        assert place[field]
        place[field] = bend(place[field])
        (folder / SIGNATURE_NAME).write_text(json.dumps(table))

    return make


def _set_pad_bits(text: str) -> str:
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    assert text.endswith("==")
    bent = text[:-3] + alphabet[alphabet.index(text[-3]) + 1] + "=="
    assert base64.b64decode(bent) == base64.b64decode(text)
    return bent


_BAD_JSON: dict[str, Bend] = {
    "a byte-order mark": lambda raw: b"\xef\xbb\xbf" + raw,
    "trailing garbage": lambda raw: raw + b"{}",
    "not UTF-8": lambda raw: raw[:-1] + b',"x":"\xff"}',
    "a lone surrogate": lambda raw: raw[:-1] + b',"x":"\\ud800"}',
    "NaN": lambda raw: raw[:-1] + b',"x":NaN}',
    "a duplicate key": lambda raw: raw[:-1] + b',"x":[{"y":1,"y":1}]}',
    "nested too deep": lambda raw: raw[:-1] + b',"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "a list": lambda raw: b"[" + raw + b"]",
    "cut short": lambda raw: raw[:-1],
    "nothing but spaces": lambda _raw: b"  ",
}
_NAMES = ("../x", "/x", "a/../b", "./a", "a//b", "a\\b", "a\0b", "C:x", "a/", "", ".", "..", "a\u202eb", "a\nb")
_LONG_NAMES = ("x" * 2000, "a/" * 600 + "x", "x" * 300)
_DIGEST = "ab" * 32
_BAD_DIGESTS = {
    "upper case": _DIGEST.upper(),
    "63 digits": _DIGEST[1:],
    "a prefix": "sha256:" + _DIGEST,
    "a path": "../" + _DIGEST[3:],
    "a line break": _DIGEST + "\n",
    "other digits": "\uff11" * 64,
}


@dataclasses.dataclass(frozen=True)
class _Chain:
    """Certificates, leaf first, and the root that the policy trusts."""

    parties: tuple[Party, ...]
    root: Party


def _chains() -> dict[str, Callable[[], _Chain]]:
    def plain(**options: Any) -> _Chain:
        root = authority()
        return _Chain((leaf(root, **options),), root)

    def not_ca() -> _Chain:
        root = authority()
        middle = leaf(root, "middle", key_usage=usage("digital_signature", "key_cert_sign"))
        return _Chain((leaf(middle), middle), root)

    def too_long() -> _Chain:
        root = authority(path_length=0)
        middle = intermediate(root)
        return _Chain((leaf(middle), middle), root)

    def own_root() -> _Chain:
        """The bundle brings the root that vouches for it."""
        bundled = authority()
        return _Chain((leaf(bundled), bundled), authority())

    return {
        "expired": lambda: plain(start=CHAIN_NOW - 3 * DAY, end=CHAIN_NOW - 2 * DAY),
        "not yet valid": lambda: plain(start=CHAIN_NOW + DAY, end=CHAIN_NOW + 2 * DAY),
        "issued by no CA": not_ca,
        "for servers": lambda: plain(purposes=[SERVER_AUTH]),
        "path too long": too_long,
        "root in the bundle": own_root,
    }


def _chain_case(name: str, chain: Callable[[], _Chain] | None, code: int) -> Case:
    made: list[_Chain] = []

    def make(folder: Path) -> None:
        root = authority()
        made.append(chain() if chain is not None else _Chain((), root))
        parties = made[-1].parties
        key = fixed_key(9)
        if parties:
            private = load_pem_private_key(parties[0].key_pem, None)
            payload = payload_in(folder)
            signature = private.sign(pae(PAYLOAD_TYPE, payload), ec.ECDSA(hashes.SHA256()))  # type: ignore[union-attr,call-arg,arg-type]
            raw = json.loads(chain_bundle(key, [party.der for party in parties], payload))
            raw["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(signature).decode()
            (folder / SIGNATURE_NAME).write_text(json.dumps(raw))
        else:
            (folder / SIGNATURE_NAME).write_bytes(chain_bundle(key, [], payload_in(folder)))

    def policy(_folder: Path) -> str:
        return json.dumps({"schema": "memopt.trust/1", "certificate_roots": [made[-1].root.pem.decode()]})

    return Case(39, f"certificate, {name}", code, make, policy=policy, clock=CHAIN_NOW)


def _good_chain() -> _Chain:
    root = authority()
    middle = intermediate(root)
    return _Chain((leaf(middle, purposes=[CODE_SIGNING]), middle), root)


def _nothing(_folder: Path) -> None:
    return


def _root_digest(folder: Path) -> str:
    return str(json.loads(payload_in(folder))["subject"][0]["digest"]["sha256"])


CASES = (
    *(Case(13, f"signed name {name[:20]!a}", 8, _resource(name=name)) for name in (*_NAMES, *_LONG_NAMES)),
    *(Case(13, f"name {name[:20]!a} in the manifest", 8, _first_file(path=name)) for name in (*_NAMES, *_LONG_NAMES)),
    Case(20, "another identity", 5, _signed(identity="acme/other"), ("acme/other",), _policy(identity=IDENTITY)),
    Case(20, "another release's trust files", 5, _transplant, ("acme/other",), _policy(identity=IDENTITY)),
    Case(20, "the identity asked for", 0, _nothing, policy=_policy(identity=IDENTITY)),
    Case(21, "rollback", 5, _nothing, ("counter 7", "floor 8"), _policy(min_counters={IDENTITY: 8})),
    Case(21, "the floor itself", 0, _nothing, policy=_policy(min_counters={IDENTITY: 7})),
    Case(22, "expired", 5, _signed(not_after=CREATED + 10), ("2023-11-14T22:13:30Z", "22:13:31Z"), clock=CREATED + 11),
    Case(22, "expires this second", 0, _signed(not_after=CREATED + 10), clock=CREATED + 10),
    Case(22, "not yet valid", 5, _nothing, ("2023-11-14T22:13:20Z", "2023-11-14T20:13:20Z"), clock=CREATED - 7200),
    Case(22, "a clock at 1970", 5, _nothing, ("2023-11-14", "1970-01-01"), clock=0),
    Case(22, "too old", 5, _nothing, ("3,600",), _policy(max_age_seconds=3600), clock=CREATED + 3601),
    Case(23, "revoked release", 5, _nothing, ("revoked",), lambda f: policy_json(revoked_digests=[_root_digest(f)])),
    Case(23, "revoked key", 5, _nothing, ("revoked",), _policy(revoked_keys=[KEY.public_key.hint])),
    Case(23, "revoked key, by SPKI", 5, _nothing, ("revoked",), _policy(revoked_keys=[KEY.public_key.spki_sha256])),
    Case(24, "another key", 3, _signed(OTHER), (OTHER.public_key.hint[:8],)),
    Case(24, "right hint, another key", 3, _signature(_by_another_key_with_our_hint), (KEY.public_key.hint[:8],)),
    Case(24, "a signature over other bytes", 3, _signature(_over_other_bytes)),
    Case(25, "another payload type", 3, _signature(lambda payload: bundle_of(KEY, payload, signed_type="text/plain"))),
    Case(
        26,
        "SLSA predicate",
        8,
        _payload(_replaced(PREDICATE_TYPE, "https://slsa.dev/provenance/v1")),
        ("slsa.dev",),
    ),
    *(Case(27, f"{name} key", 9, _nothing, policy=_foreign_policy(make)) for name, make in _FOREIGN_KEYS.items()),
    Case(27, "P-256 with SHA-512", 3, _signature(_sha512)),
    Case(29, "one key twice in the policy", 3, _nothing, ("1 distinct",), _two_keys_in_policy),
    Case(29, "one signature under two names", 3, _twice, policy=_both_keys),
    Case(29, "one of two keys", 3, _nothing, policy=_both_keys),
    Case(29, "two keys", 0, _signed(KEY, OTHER), policy=_both_keys),
    Case(30, "no signature", 8, _remove_signature, (SIGNATURE_NAME, "missing")),
    Case(30, "empty signature", 8, _raw_signature(lambda _: b""), (SIGNATURE_NAME, "empty")),
    Case(30, "signature is a folder", 8, _signature_folder, (SIGNATURE_NAME, "folder")),
    Case(30, "signature is an LFS pointer", 8, _raw_signature(lambda _: _LFS), (SIGNATURE_NAME, "LFS")),
    Case(31, "nothing is signed", 8, _statement(lambda table: table["predicate"].update(resources=[]))),
    Case(31, "only the signature is signed", 8, _resource(name=SIGNATURE_NAME)),
    Case(31, "empty manifest", 8, _manifest(lambda manifest: dataclasses.replace(manifest, files=()))),
    Case(31, "the manifest lists itself", 8, _first_file(path=MANIFEST_NAME)),
    *(Case(32, f"bundle: {name}", 8, _raw_signature(bend), (SIGNATURE_NAME,)) for name, bend in _BAD_JSON.items()),
    *(Case(32, f"statement: {name}", 8, _payload(bend), (SIGNATURE_NAME,)) for name, bend in _BAD_JSON.items()),
    *(Case(32, f"manifest: {name}", 8, _manifest_text(bend), (MANIFEST_NAME,)) for name, bend in _BAD_JSON.items()),
    *(
        Case(32, f"counter {text}", 8, _manifest_text(_replaced('"counter":7', f'"counter":{text}')), (MANIFEST_NAME,))
        for text in ("1e400", "9223372036854775808.0", "7.0", "-1", "true", '"7"', "null", "1" * 5000, "9" * 20)
    ),
    Case(34, "base64 with a line break", 8, _padded_base64(lambda text: text[:76] + "\n" + text[76:]), ("base64",)),
    Case(34, "base64 without padding", 8, _padded_base64(lambda text: text.rstrip("=")), ("base64",)),
    Case(34, "URL alphabet", 8, _padded_base64(lambda text: text[:10] + "-" + text[11:]), ("base64",)),
    Case(34, "non-zero pad bits", 8, _padded_base64(_set_pad_bits), ("base64",)),
    Case(34, "a space in the signature", 8, _padded_base64(lambda text: text + " ", "sig"), ("base64",)),
    *(Case(35, f"digest with {name}", 8, _resource(digest=digest)) for name, digest in _BAD_DIGESTS.items()),
    *(Case(35, f"algorithm {name}", 8, _resource(algorithm=name)) for name in ("sha1", "md5", "SHA256", "sha-256", "")),
    Case(
        36,
        "wrong root digest",
        8,
        _statement(lambda t: t["subject"][0]["digest"].update(sha256=_DIGEST), fix_root=False),
    ),
    Case(36, "wrong size in the manifest", 8, _first_file(size_bytes=12345), (CHUNKS_NAME,)),
    Case(36, "wrong digest in the manifest", 8, _first_file(sha256=_DIGEST), (MANIFEST_NAME,)),
    Case(36, "wrong chunk root in the manifest", 8, _first_file(chunk_root=_DIGEST), (CHUNKS_NAME,)),
    Case(
        37,
        "a file listed twice",
        8,
        _statement(lambda t: t["predicate"]["resources"].append(t["predicate"]["resources"][0])),
    ),
    Case(37, "a file under an ignored path", 8, _resource(name=".git/config")),
    *(Case(37, f"ignored path {path!a}", 8, _ignore(path)) for path in (".", "weights/", "*.py", "../x", "/", "")),
    Case(37, "a file left out", 5, _ignore("modeling.py"), ("modeling.py",)),
    Case(37, "Git's files left out", 0, _ignore(".git", ".github", SIGNATURE_NAME)),
    Case(
        38,
        "predicate of model-signing 0.x",
        9,
        _payload(_replaced(PREDICATE_TYPE, LEGACY_PREDICATE_TYPE)),
    ),
    Case(38, "PAE of model-signing 0.2", 9, _signature(_legacy_pae)),
    *(_chain_case(name, chain, 3) for name, chain in _chains().items()),
    _chain_case("empty chain", None, 3),
    _chain_case("a good chain", _good_chain, 0),
)
