"""A signed INT4 release of the trained example, as `memopt compress` and `memopt sign` make it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from signing_keys import fixed_key
from tiny_checkpoints import TINY_GLM5

import memopt
from memopt.manifests.signer import KeySigner

IDENTITY = "acme/tiny-glm5-int4"
KEY = fixed_key(1)
_CREATED = 1_700_000_000


@dataclass(frozen=True)
class SignedModel:
    """`folder`: the release. `key`: the public key that signed it, a file."""

    folder: Path
    key: Path


def signed_tiny_model(root: Path, *, tensor_parallel: int = 1) -> SignedModel:
    """Compress and sign below the new or empty folder `root`; with rank files for a `tensor_parallel` above 1."""
    root.mkdir(exist_ok=True)
    folder, key = root / "release", root / "release.pub"
    options = memopt.PlanOptions(tensor_parallel=tensor_parallel)
    memopt.compress(TINY_GLM5, folder, recipe="glm-5.2-int4", options=options, workers=1, device="cpu")
    memopt.sign_release(folder, [KeySigner(KEY)], memopt.SignOptions(IDENTITY, 7, created=_CREATED))
    key.write_bytes(KEY.public_key.pem)
    return SignedModel(folder, key)
