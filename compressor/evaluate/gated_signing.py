"""Signing a release that its own recipe lets be signed: what `memopt sign` and `memopt.sign_release` do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from memopt.compressor.evaluate.release_gate import require_release_gate
from memopt.manifests import sign
from memopt.manifests.signer import Signer


def sign_release(
    folder: str | Path,
    signers: Sequence[Signer],
    options: sign.SignOptions | None = None,
    progress: sign.ProgressCallback | None = None,
) -> sign.SignResult:
    """Write manifest, chunk digests, SHA256SUMS and one signature a signer into `folder`, replacing earlier ones.

    Raises as `require_release_gate` (QualityGateError: the recipe's gate does not hold) and as
    `memopt.manifests.sign.sign_release`.
    """
    require_release_gate(Path(folder))
    return sign.sign_release(folder, signers, options, progress)
