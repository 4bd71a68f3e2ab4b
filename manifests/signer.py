"""Who makes a signature: a private key in this process, or a command that reaches an HSM or a KMS."""

from __future__ import annotations

import selectors
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import Protocol

from memopt.errors import MemoptIOError, SignatureError, UsageError
from memopt.manifests.keys import MAX_SIGNATURE_SIZE_BYTES, PrivateKey, PublicKey, verify

DEFAULT_TIMEOUT_S = 120.0


class Signer(Protocol):
    """Signs the DSSE pre-authentication encoding (PAE) of a statement."""

    @property
    def public_key(self) -> PublicKey: ...

    def sign(self, pae: bytes) -> bytes:
        """The DER ECDSA signature of `pae`."""
        ...


class KeySigner:
    """Signs with a private key; the same input gives the same bytes (RFC 6979)."""

    def __init__(self, private: PrivateKey) -> None:
        self._private = private

    @property
    def public_key(self) -> PublicKey:
        return self._private.public_key

    def sign(self, pae: bytes) -> bytes:
        return self._private.sign(pae)


class CommandSigner:
    """Signs with a command: the PAE on its standard input, the DER signature on its standard output.

    The command hashes by itself: SHA-256 for P-256, SHA-384 for P-384, SHA-512 for P-521. It runs without a shell;
    its standard error is the user's, so that it can ask for a PIN.
    """

    def __init__(self, argv: Sequence[str], public_key: PublicKey, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if not argv:
            raise UsageError("the sign command is empty")
        self._argv = list(argv)
        self._public_key = public_key
        self._timeout_s = timeout_s

    @property
    def public_key(self) -> PublicKey:
        return self._public_key

    def sign(self, pae: bytes) -> bytes:
        """Run the command once. The signature is checked against the public key before it is returned.

        Raises UsageError if it cannot be started, MemoptIOError on a time-out, SignatureError for all else.
        """
        signature = self._run(pae)
        if not verify(self._public_key, signature, pae):
            is_der = signature.startswith(b"\x30")
            remedy = "is it another key's, or another hash?" if is_der else "it must print raw DER, not base64 or hex"
            raise SignatureError(
                f"{self._argv[0]} printed {len(signature)} bytes that are no signature by key "
                f"{self._public_key.hint[:8]} over its input",
                remedy=remedy,
            )
        return signature

    def _run(self, pae: bytes) -> bytes:
        # A file, not a pipe: a command that never reads cannot block us, and one that stops early cannot break us.
        with tempfile.TemporaryFile() as source:
            source.write(pae)
            source.seek(0)
            try:
                process = subprocess.Popen(self._argv, stdin=source, stdout=subprocess.PIPE)
            except (OSError, ValueError) as problem:
                reason = problem.strerror if isinstance(problem, OSError) else str(problem)
                raise UsageError(f"cannot start the sign command {self._argv[0]!r}: {reason}") from None
        deadline = time.monotonic() + self._timeout_s
        try:
            signature = self._read(process, deadline)
            status = process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except (subprocess.TimeoutExpired, TimeoutError):
            raise MemoptIOError(
                f"the sign command {self._argv[0]} took more than {self._timeout_s:g} s", remedy="try again"
            ) from None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        if status != 0:
            raise SignatureError(f"the sign command {self._argv[0]} ended with status {status}")
        return signature

    def _read(self, process: subprocess.Popen[bytes], deadline: float) -> bytes:
        """Standard output to its end, at most one byte more than a signature can have."""
        signature = b""
        stream = process.stdout
        if stream is None:
            return signature
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while len(signature) <= MAX_SIGNATURE_SIZE_BYTES:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                part = stream.read1(MAX_SIGNATURE_SIZE_BYTES + 1 - len(signature))  # type: ignore[attr-defined]
                if not part:
                    return signature
                signature += part
        raise SignatureError(
            f"the sign command {self._argv[0]} printed more than {MAX_SIGNATURE_SIZE_BYTES} bytes",
            remedy="it must print the raw DER signature alone",
        )
