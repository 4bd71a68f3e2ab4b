"""Signing keys: P-256, P-384 and P-521 in PEM files, each curve with its own hash as OMS v1.0 asks."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from memopt.errors import KeyFileError, LayoutError, MemoptIOError, MissingFileError, UnsupportedError, UsageError
from memopt.manifests.open_file import open_regular, read_exactly

if TYPE_CHECKING:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

CURVES = ("p256", "p384", "p521")
# cryptography's own limit for PKCS#8 passphrases.
MAX_PASSPHRASE_BYTES = 1023
_MAX_KEY_SIZE_BYTES = 16 * 2**10
# SHA-512 of a P-521 signature in DER is 141 bytes at most.
MAX_SIGNATURE_SIZE_BYTES = 256
_CURVE_NAMES = {"secp256r1": "p256", "secp384r1": "p384", "secp521r1": "p521"}
_OTHERS_MAY_TOUCH = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True)
class PublicKey:
    """`pem`: canonical SubjectPublicKeyInfo PEM. `hint`: SHA-256 (hex) of that text with its final newline, as OMS
    v1.0 names a key. `spki_sha256`: SHA-256 (hex) of the DER, which tells keys apart. `curve`: one of CURVES."""

    pem: bytes
    hint: str
    spki_sha256: str
    curve: str


@dataclass(frozen=True)
class PrivateKey:
    """A private key in memory. Its text form shows the public part alone."""

    public_key: PublicKey
    _key: ec.EllipticCurvePrivateKey = field(repr=False, compare=False)

    def sign(self, message: bytes) -> bytes:
        """DER ECDSA signature; the nonce is RFC 6979's, so the same message gives the same bytes."""
        from cryptography.hazmat.primitives.asymmetric import ec

        return self._key.sign(message, ec.ECDSA(_hash_of(self.public_key.curve), deterministic_signing=True))

    def to_pem(self, passphrase: bytes | None) -> bytes:
        """PKCS#8 PEM, encrypted if there is a passphrase. Raises KeyFileError for an empty or overlong passphrase."""
        from cryptography.hazmat.primitives import serialization

        encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if passphrase is not None:
            check_passphrase(passphrase)
            encryption = serialization.BestAvailableEncryption(passphrase)
        return self._key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


def check_passphrase(passphrase: bytes) -> None:
    """KeyFileError unless the passphrase has 1 to 1,023 bytes."""
    if not 0 < len(passphrase) <= MAX_PASSPHRASE_BYTES:
        raise KeyFileError(f"the passphrase has {len(passphrase):,} bytes, 1 to {MAX_PASSPHRASE_BYTES:,} are possible")


def _hash_of(curve: str) -> hashes.HashAlgorithm:
    from cryptography.hazmat.primitives import hashes

    kinds: dict[str, type[hashes.SHA256 | hashes.SHA384 | hashes.SHA512]]
    kinds = {"p256": hashes.SHA256, "p384": hashes.SHA384, "p521": hashes.SHA512}
    return kinds[curve]()


def generate_private_key(curve: str = "p256") -> PrivateKey:
    """A new key from the system's randomness. Raises UsageError for a curve that is not in CURVES."""
    from cryptography.hazmat.primitives.asymmetric import ec

    kinds: dict[str, type[ec.SECP256R1 | ec.SECP384R1 | ec.SECP521R1]]
    kinds = {"p256": ec.SECP256R1, "p384": ec.SECP384R1, "p521": ec.SECP521R1}
    if curve not in kinds:
        raise UsageError(f"curve {curve!r} is not one of {', '.join(CURVES)}")
    key = ec.generate_private_key(kinds[curve]())
    return PrivateKey(public_key_of(key.public_key(), None), key)


def public_key_of(key: object, file: str | None) -> PublicKey:
    """Wrap a key object of `cryptography`. Raises UnsupportedError unless it is on one of the three NIST curves."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    curve = _CURVE_NAMES.get(key.curve.name) if isinstance(key, ec.EllipticCurvePublicKey) else None
    if curve is None or not isinstance(key, ec.EllipticCurvePublicKey):
        kind = key.curve.name if isinstance(key, ec.EllipticCurvePublicKey) else _kind_of(key)
        raise UnsupportedError(
            f"a {kind} key; P-256, P-384 and P-521 are supported", file=file, remedy="make a key with `memopt keygen`"
        )
    spki = serialization.PublicFormat.SubjectPublicKeyInfo
    pem = key.public_bytes(serialization.Encoding.PEM, spki)
    der = key.public_bytes(serialization.Encoding.DER, spki)
    return PublicKey(pem, hashlib.sha256(pem).hexdigest(), hashlib.sha256(der).hexdigest(), curve)


def _kind_of(key: object) -> str:
    return type(key).__name__.lstrip("_").removesuffix("PublicKey").removesuffix("PrivateKey") or "different"


def _read_key_file(path: Path, *, is_private: bool, allow_open_mode: bool) -> bytes:
    try:
        with open_regular(path) as (descriptor, status):
            if is_private and not allow_open_mode and stat.S_IMODE(status.st_mode) & _OTHERS_MAY_TOUCH:
                raise KeyFileError(
                    f"mode {stat.S_IMODE(status.st_mode):04o} lets others at the private key",
                    file=str(path),
                    remedy=f"chmod 600 {path}",
                )
            raw = read_exactly(descriptor, _MAX_KEY_SIZE_BYTES + 1, 0)
    except MissingFileError:
        raise KeyFileError("there is no such key file", file=str(path)) from None
    except LayoutError as problem:
        raise KeyFileError(problem.message, file=str(path)) from None
    except OSError as problem:
        raise MemoptIOError(f"cannot read: {problem.strerror}", file=str(path)) from None
    if len(raw) > _MAX_KEY_SIZE_BYTES:
        raise KeyFileError(f"more than {_MAX_KEY_SIZE_BYTES:,} bytes, this is no key file", file=str(path))
    return raw


def _pem_label(raw: bytes, file: str | None) -> str:
    """The label of the one PEM block that `raw` must be, with nothing but white space around it."""
    text = raw.strip()
    first = text.split(b"\n", 1)[0].strip()
    if not (first.startswith(b"-----BEGIN ") and first.endswith(b"-----")):
        raise KeyFileError("is not PEM", file=file, remedy="`memopt keygen` makes a key; DER must be converted first")
    label = first[len(b"-----BEGIN ") : -len(b"-----")]
    if text.count(b"-----BEGIN ") != 1 or not text.endswith(b"-----END " + label + b"-----"):
        raise KeyFileError("holds more than one PEM block, or text after it", file=file, remedy="one key a file")
    return label.decode("ascii", "replace")


def load_private_key(path: str | Path, passphrase: bytes | None, *, allow_open_mode: bool = False) -> PrivateKey:
    """Read a PKCS#8 PEM key file, whose mode must keep others out unless `allow_open_mode`.

    Raises KeyFileError (passphrase missing, wrong or needless; mode; format), UnsupportedError for other kinds of key,
    MemoptIOError when the file cannot be read.
    """
    raw = _read_key_file(Path(path), is_private=True, allow_open_mode=allow_open_mode)
    return parse_private_key(raw, passphrase, str(path))


def parse_private_key(raw: bytes, passphrase: bytes | None, file: str | None = None) -> PrivateKey:
    """Parse PKCS#8 PEM; raises as `load_private_key`."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    label = _pem_label(raw, file)
    if label not in {"PRIVATE KEY", "ENCRYPTED PRIVATE KEY"}:
        is_private = label.endswith("PRIVATE KEY")
        what = f"is a {label}, not a PKCS#8 private key" if is_private else f"holds a {label}, not a private key"
        remedy = "convert it: openssl pkcs8 -topk8 -in OLD.pem -out NEW.pem" if is_private else "give the private key"
        raise KeyFileError(what, file=file, remedy=remedy)
    is_encrypted = label == "ENCRYPTED PRIVATE KEY"
    if is_encrypted and passphrase is None:
        raise KeyFileError(
            "the key is encrypted and no passphrase is given",
            file=file,
            remedy="give --passphrase-file or --passphrase-env",
        )
    if not is_encrypted and passphrase is not None:
        raise KeyFileError("a passphrase is given, but the key is not encrypted", file=file, remedy="leave it out")
    if passphrase is not None:
        check_passphrase(passphrase)
    try:
        key = load_pem_private_key(raw, passphrase)
    except UnsupportedAlgorithm:
        raise UnsupportedError("the key's type or encryption is not supported", file=file) from None
    except (ValueError, TypeError):
        # The library's text may tell more about the key than a log should hold.
        reason = "wrong passphrase, or a damaged key" if is_encrypted else "a damaged private key"
        raise KeyFileError(reason, file=file) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UnsupportedError(
            f"a {_kind_of(key)} key; P-256, P-384 and P-521 are supported",
            file=file,
            remedy="make a key with `memopt keygen`",
        )
    return PrivateKey(public_key_of(key.public_key(), file), key)


def kind_of_key_file(path: str | Path) -> str:
    """The file's PEM label, as "PUBLIC KEY" or "ENCRYPTED PRIVATE KEY". Raises KeyFileError or MemoptIOError."""
    raw = _read_key_file(Path(path), is_private=False, allow_open_mode=True)
    return _pem_label(raw, str(path))


def load_public_key(path_or_pem: str | Path | bytes, file: str | None = None) -> PublicKey:
    """Read a public key from a path, or from PEM text itself (bytes, or a string that begins as PEM).

    Raises KeyFileError when it is no public key, UnsupportedError unless it is P-256, P-384 or P-521.
    """
    if isinstance(path_or_pem, bytes):
        return _parse_public_key(path_or_pem, file)
    if isinstance(path_or_pem, str) and path_or_pem.lstrip().startswith("-----BEGIN "):
        return _parse_public_key(path_or_pem.encode(), file)
    raw = _read_key_file(Path(path_or_pem), is_private=False, allow_open_mode=True)
    return _parse_public_key(raw, os.fspath(path_or_pem))


def _parse_public_key(raw: bytes, file: str | None) -> PublicKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    if len(raw) > _MAX_KEY_SIZE_BYTES:
        raise KeyFileError(f"more than {_MAX_KEY_SIZE_BYTES:,} bytes, this is no key", file=file)
    label = _pem_label(raw, file)
    if label != "PUBLIC KEY":
        remedy = "give the .pub file that `memopt keygen` wrote beside it" if "PRIVATE" in label else ""
        raise KeyFileError(f"holds a {label}, not a public key", file=file, remedy=remedy)
    try:
        key = load_pem_public_key(raw)
    except UnsupportedAlgorithm:
        raise UnsupportedError("the key's type is not supported", file=file) from None
    except (ValueError, TypeError):
        raise KeyFileError("a damaged public key", file=file) from None
    return public_key_of(key, file)


def verify(public: PublicKey, signature_der: bytes, message: bytes) -> bool:
    """Whether the DER signature is `public`'s over `message`, with its curve's hash. Never raises for bad bytes."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    key = load_pem_public_key(public.pem)
    if not isinstance(key, ec.EllipticCurvePublicKey) or len(signature_der) > MAX_SIGNATURE_SIZE_BYTES:
        return False
    try:
        key.verify(signature_der, message, ec.ECDSA(_hash_of(public.curve)))
    except InvalidSignature:
        return False
    return True
