"""X.509 chains for tests: an authority that issues whatever it is told to."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

NOW = 1_800_000_000
DAY = 86_400
CODE_SIGNING = ExtendedKeyUsageOID.CODE_SIGNING
SERVER_AUTH = ExtendedKeyUsageOID.SERVER_AUTH


def usage(*names: str) -> x509.KeyUsage:
    every = ["digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"]
    every += ["key_cert_sign", "crl_sign", "encipher_only", "decipher_only"]
    return x509.KeyUsage(**{name: name in names for name in every})


@dataclass(frozen=True)
class Party:
    """A certificate and its key; issues further ones."""

    certificate: x509.Certificate
    key: Any

    @property
    def der(self) -> bytes:
        return self.certificate.public_bytes(Encoding.DER)

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    def issue(self, name: str, **options: Any) -> Party:
        return issue(name, issuer=self, **options)


def issue(
    name: str,
    *,
    issuer: Party | None = None,
    key: Any = None,
    ca: bool | None = False,
    path_length: int | None = None,
    key_usage: x509.KeyUsage | None = None,
    purposes: list[x509.ObjectIdentifier] | None = None,
    start: int = NOW - DAY,
    end: int = NOW + DAY,
    extra: x509.ExtensionType | None = None,
    digest: hashes.HashAlgorithm | None = None,
) -> Party:
    """A certificate; self-signed without an issuer. `ca=None` leaves the basic constraints out."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.certificate.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.fromtimestamp(start, UTC))
        .not_valid_after(datetime.fromtimestamp(end, UTC))
    )
    if ca is not None:
        builder = builder.add_extension(x509.BasicConstraints(ca, path_length if ca else None), critical=True)
    if key_usage is not None:
        builder = builder.add_extension(key_usage, critical=True)
    if purposes is not None:
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    if extra is not None:
        builder = builder.add_extension(extra, critical=True)
    return Party(builder.sign((issuer.key if issuer else key), digest or hashes.SHA256()), key)


def authority(name: str = "root", **options: Any) -> Party:
    """A self-signed root."""
    return issue(name, **{"ca": True, "key_usage": usage("key_cert_sign"), **options})


def intermediate(issuer: Party, name: str = "middle", **options: Any) -> Party:
    return issuer.issue(name, **{"ca": True, "key_usage": usage("key_cert_sign"), **options})


def leaf(issuer: Party, name: str = "signer", **options: Any) -> Party:
    return issuer.issue(
        name, **{"ca": False, "key_usage": usage("digital_signature"), "purposes": [CODE_SIGNING], **options}
    )
