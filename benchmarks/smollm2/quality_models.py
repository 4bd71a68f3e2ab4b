"""The models whose releases are measured, what they are calibrated with, and texts that calibration never sees."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.smollm2.as_glm4_moe import ExpertSplit
from benchmarks.smollm2.lossless_encoder import lossless_encoder
from benchmarks.smollm2.prepare import fetch_source, write_model, write_texts
from benchmarks.smollm2.standard_library import LIBRARY_PACKAGES, library_texts
from benchmarks.smollm2.texts import write_jsonl
from memopt.compressor.evaluate.calibration_data import read_token_data
from memopt.compressor.evaluate.stored_model import StoredModel

TINY_GLM5 = Path(__file__).parents[2] / "examples" / "tiny-glm5-fp8"
# The example was trained without it.
TINY_HELD_OUT = "idlelib"
IDS_FILE = "calibration-ids.safetensors"


@dataclass(frozen=True, slots=True)
class QualityModel:
    """`folder` holds IDS_FILE, what to calibrate with, a text `NAME.jsonl` for each of `texts`, and the releases.

    `num_samples` of `sample_tokens` tokens calibrate; windows of at most `window_tokens` are measured. `family` is the
    recipe's word for the architecture.
    """

    name: str
    family: str
    checkpoint: Path
    folder: Path
    texts: tuple[str, ...]
    num_samples: int
    sample_tokens: int
    window_tokens: int

    @property
    def calibration_ids(self) -> Path:
        """Calibration's tokens, one tensor int32 [N]."""
        return self.folder / IDS_FILE


def smollm2(folder: Path, downloads: Path, num_samples: int = 32) -> QualityModel:
    """SmolLM2-135M as glm4_moe; English manuals and code of Django to calibrate with, of Celery to measure."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / "checkpoint"
    if not checkpoint.exists():
        write_model(fetch_source(downloads), checkpoint, ExpertSplit(), use_fp8=True)
    write_texts(folder, downloads)
    write_ids(checkpoint, folder / "calibration.jsonl", folder / IDS_FILE)
    texts = ("held-out-english", "held-out-code")
    return QualityModel("smollm2", "glm4_moe", checkpoint, folder, texts, num_samples, 512, 512)


def tiny_glm5(folder: Path, num_samples: int = 32) -> QualityModel:
    """The trained example; the standard library's sources to calibrate with, `idlelib` to measure on.

    It was trained on sequences of 128 tokens. Four times as many samples of a quarter of the tokens are as much text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "calibration.jsonl", library_texts(*LIBRARY_PACKAGES))
    write_jsonl(folder / f"{TINY_HELD_OUT}.jsonl", library_texts(TINY_HELD_OUT))
    write_ids(TINY_GLM5, folder / "calibration.jsonl", folder / IDS_FILE)
    return QualityModel("tiny-glm5", "glm_moe_dsa", TINY_GLM5, folder, (TINY_HELD_OUT,), 4 * num_samples, 128, 128)


def write_ids(checkpoint: Path, text: Path, ids_file: Path) -> None:
    """Write the documents of `text` end to end as one tensor int32 [N]."""
    with StoredModel(checkpoint) as model:
        data = read_token_data(text, model.config.vocab_size, lossless_encoder(checkpoint))
    stream = torch.cat([torch.from_numpy(document) for document in data.documents]).to(torch.int32)
    save_file({"ids": stream}, ids_file)


def file_digest(path: Path) -> str:
    """SHA-256 (hex) of a file."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
