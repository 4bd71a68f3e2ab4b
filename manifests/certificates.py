"""X.509 chains of signed bundles: leaf first, each certificate issued by the next, the last by a trusted root.

Checked at the time of verification, never at the leaf's own: an expired certificate stays expired. Revocation lists
are not fetched; a policy revokes keys. Source: RFC 5280 section 6.1 without name constraints and policies, which are
refused where they are critical; OMS v1.0 for the leaf's usage.
"""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING

from memopt.errors import PolicyFileError, SignatureError
from memopt.manifests.keys import PublicKey, public_key_of

if TYPE_CHECKING:
    from cryptography import x509

MAX_CHAIN = 10
_MIN_RSA_BITS = 2048
_MIN_EC_BITS = 256
_SIGNATURE_HASHES = {"sha256", "sha384", "sha512"}


def certificate_from_pem(raw: bytes, file: str) -> bytes:
    """The DER of the one certificate in `raw`. Raises PolicyFileError: it stands in a policy."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    try:
        certificates = x509.load_pem_x509_certificates(raw)
    except _parse_errors():
        certificates = []
    if len(certificates) != 1:
        raise PolicyFileError("a certificate root is not one PEM certificate", file=file, remedy="one PEM an entry")
    return certificates[0].public_bytes(Encoding.DER)


def check_chain(chain: tuple[bytes, ...], roots: tuple[bytes, ...], now: int) -> PublicKey:
    """The leaf's key, if the chain leads to one of `roots` (DER) and every certificate may do what it does.

    `now`: seconds since 1970, UTC. Raises SignatureError, naming the certificate; UnsupportedError for a leaf key that
    is not on P-256, P-384 or P-521.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.x509 import load_der_x509_certificate

    if not chain:
        raise SignatureError("the certificate chain is empty")
    if len(chain) > MAX_CHAIN:
        raise SignatureError(f"{len(chain)} certificates, at most {MAX_CHAIN} make a chain")
    try:
        certificates = [load_der_x509_certificate(der) for der in chain]
        for der, certificate in zip(chain, certificates, strict=True):
            # The count of unused bits before the signature is not signed, and zero in every signature that is made.
            if der[-len(certificate.signature) - 1] != 0:
                raise SignatureError(f"certificate {_name(certificate)} is malformed")
        return _check(certificates, [load_der_x509_certificate(der) for der in roots], now)
    except UnsupportedAlgorithm:
        raise SignatureError("a certificate uses an algorithm that is not supported") from None
    except _parse_errors():
        raise SignatureError("a certificate of the chain is malformed") from None


def _parse_errors() -> tuple[type[Exception], ...]:
    """What `cryptography` raises for a damaged certificate, some of it only when an extension is looked at."""
    from cryptography import x509

    return (ValueError, TypeError, x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType)


def chain_key_digests(chain: tuple[bytes, ...]) -> tuple[str, ...]:
    """SHA-256 (hex) of every certificate's SubjectPublicKeyInfo, for revocation. The chain must have been checked."""
    import hashlib

    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
    from cryptography.x509 import load_der_x509_certificate

    keys = (load_der_x509_certificate(der).public_key() for der in chain)
    spki = PublicFormat.SubjectPublicKeyInfo
    return tuple(hashlib.sha256(key.public_bytes(Encoding.DER, spki)).hexdigest() for key in keys)


def _check(chain: list[x509.Certificate], roots: list[x509.Certificate], now: int) -> PublicKey:
    for certificate in chain:
        if certificate.issuer == certificate.subject:
            raise SignatureError(
                f"certificate {_name(certificate)} is self-issued: a root must come from the policy, not the bundle"
            )
    _check_leaf(chain[0])
    anchors = [root for root in roots if root.subject == chain[-1].issuer and _is_issued_by(chain[-1], root)]
    if not anchors:
        raise SignatureError(
            f"certificate {_name(chain[-1])} is not issued by a trusted root",
            remedy="add its root to the policy, if it is trusted",
        )
    # A renewed root has the same name and key: one that holds is enough.
    problems: list[SignatureError] = []
    for anchor in anchors:
        try:
            _check_path([*chain, anchor], now)
        except SignatureError as problem:
            problems.append(problem)
        else:
            return public_key_of(chain[0].public_key(), None)
    raise problems[0]


def _check_path(path: list[x509.Certificate], now: int) -> None:
    for certificate in path:
        _check_validity(certificate, now)
        _check_extensions(certificate)
    for depth, issuer in enumerate(path[1:]):
        _check_issuer(issuer, depth)
    for certificate, issuer in pairwise(path):
        if not _is_issued_by(certificate, issuer):
            raise SignatureError(f"certificate {_name(certificate)} is not issued by {_name(issuer)}")


def _name(certificate: x509.Certificate) -> str:
    return ascii(certificate.subject.rfc4514_string())[:120]


def _is_issued_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import ec, rsa

    key = issuer.public_key()
    is_strong = (isinstance(key, ec.EllipticCurvePublicKey) and key.key_size >= _MIN_EC_BITS) or (
        isinstance(key, rsa.RSAPublicKey) and key.key_size >= _MIN_RSA_BITS
    )
    algorithm = certificate.signature_hash_algorithm
    if not is_strong or algorithm is None or algorithm.name not in _SIGNATURE_HASHES:
        raise SignatureError(
            f"certificate {_name(certificate)} is signed with a weak or unknown algorithm",
            remedy="EC of 256 bits or RSA of 2048 bits or more, with SHA-256, SHA-384 or SHA-512",
        )
    try:
        certificate.verify_directly_issued_by(issuer)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _check_validity(certificate: x509.Certificate, now: int) -> None:
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    try:
        moment = datetime.fromtimestamp(now, UTC)
    except (ValueError, OverflowError, OSError):
        raise SignatureError(f"the time {now} is outside the calendar") from None
    if not start <= moment <= end:
        raise SignatureError(
            f"certificate {_name(certificate)} is valid from {start:%Y-%m-%dT%H:%M:%SZ} to {end:%Y-%m-%dT%H:%M:%SZ}, "
            f"it is {moment:%Y-%m-%dT%H:%M:%SZ}",
            remedy="sign again with a valid certificate, or check this machine's clock",
        )


def _check_extensions(certificate: x509.Certificate) -> None:
    from cryptography import x509

    known = (x509.BasicConstraints, x509.KeyUsage, x509.ExtendedKeyUsage, x509.SubjectAlternativeName)
    if certificate.version is not x509.Version.v3:
        raise SignatureError(f"certificate {_name(certificate)} is not of X.509 version 3")
    for extension in certificate.extensions:
        if extension.critical and not isinstance(extension.value, known):
            raise SignatureError(
                f"certificate {_name(certificate)} has a critical extension that is not supported: "
                f"{extension.oid.dotted_string}"
            )


def _extension(certificate: x509.Certificate, kind: type[x509.ExtensionType]) -> object | None:
    from cryptography import x509

    try:
        return certificate.extensions.get_extension_for_class(kind).value
    except x509.ExtensionNotFound:
        return None


def _check_leaf(leaf: x509.Certificate) -> None:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    constraints = _extension(leaf, x509.BasicConstraints)
    if isinstance(constraints, x509.BasicConstraints) and constraints.ca:
        raise SignatureError(f"certificate {_name(leaf)} is of an authority, not of a signer")
    usage = _extension(leaf, x509.KeyUsage)
    purposes = _extension(leaf, x509.ExtendedKeyUsage)
    if isinstance(usage, x509.KeyUsage) and not usage.digital_signature:
        raise SignatureError(f"certificate {_name(leaf)} may not make signatures (key usage)")
    if isinstance(purposes, x509.ExtendedKeyUsage) and ExtendedKeyUsageOID.CODE_SIGNING not in purposes:
        raise SignatureError(f"certificate {_name(leaf)} is not for code signing (extended key usage)")
    if usage is None and purposes is None:
        raise SignatureError(f"certificate {_name(leaf)} does not say that it may sign (key usage)")


def _check_issuer(issuer: x509.Certificate, num_below: int) -> None:
    """An issuer with `num_below` intermediate certificates between itself and the leaf."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    constraints = _extension(issuer, x509.BasicConstraints)
    if not isinstance(constraints, x509.BasicConstraints) or not constraints.ca:
        raise SignatureError(f"certificate {_name(issuer)} is not of an authority (CA), but issued another")
    if constraints.path_length is not None and num_below > constraints.path_length:
        raise SignatureError(
            f"the path is too long: {_name(issuer)} allows {constraints.path_length} authorities below it, "
            f"there are {num_below}"
        )
    usage = _extension(issuer, x509.KeyUsage)
    if isinstance(usage, x509.KeyUsage) and not usage.key_cert_sign:
        raise SignatureError(f"certificate {_name(issuer)} may not sign certificates (key usage)")
    purposes = _extension(issuer, x509.ExtendedKeyUsage)
    allowed = {ExtendedKeyUsageOID.CODE_SIGNING, ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE}
    if isinstance(purposes, x509.ExtendedKeyUsage) and not allowed & set(purposes):
        raise SignatureError(f"certificate {_name(issuer)} may not issue for code signing (extended key usage)")
