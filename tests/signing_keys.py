"""Keys for tests, the same in every run and every process, so that signatures and examples are too."""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from memopt.manifests.keys import PrivateKey, parse_private_key

_KINDS = {"p256": ec.SECP256R1, "p384": ec.SECP384R1, "p521": ec.SECP521R1}


def fixed_key(number: int = 1, curve: str = "p256") -> PrivateKey:
    """The key whose secret is a function of `number`; of no use outside of tests."""
    key = ec.derive_private_key(number * 0x1234567890ABCDEF1234567890ABCDEF + 7, _KINDS[curve]())
    return parse_private_key(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), None)
