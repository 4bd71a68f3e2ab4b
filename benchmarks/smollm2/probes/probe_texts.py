"""The tokens that a probe is calibrated with, and the windows that it is measured on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.smollm2.lossless_encoder import lossless_encoder
from benchmarks.smollm2.probes.probe import CalibrationText
from benchmarks.smollm2.quality_models import QualityModel
from memopt.compressor.evaluate.calibration_data import TokenData, read_token_data
from memopt.compressor.evaluate.token_windows import Window, document_windows, packed_windows

# Documents of calibration.jsonl are English and code by turns (benchmarks.smollm2.texts.interleaved).
_TURNS: dict[CalibrationText, slice] = {
    "mixed": slice(None),
    "english": slice(0, None, 2),
    "code": slice(1, None, 2),
}


class ProbeTexts:
    """Texts of a prepared model; the calibration text is tokenized once for all probes."""

    def __init__(self, model: QualityModel, vocab_size: int) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._calibration: TokenData | None = None

    def samples(self, text: CalibrationText, num_samples: int) -> Tensor:
        """int64 [N, T]: of "mixed", the very samples that `memopt compress --samples N` takes."""
        if self._calibration is None:
            self._calibration = self._read(self._model.folder / "calibration.jsonl")
        documents = self._calibration.documents[_TURNS[text]]
        digest = replace(self._calibration.digest, num_tokens=sum(len(document) for document in documents))
        chosen = TokenData(documents, digest)
        return torch.from_numpy(packed_windows(chosen, num_samples, self._model.sample_tokens))

    def windows(self, text: str, num_windows: int) -> tuple[Window, ...]:
        """Windows of a held-out text, evenly spaced over its documents, as `memopt evaluate` takes them."""
        data = self._read(self._model.folder / f"{text}.jsonl")
        return document_windows(data, self._model.window_tokens, num_windows)

    def _read(self, path: Path) -> TokenData:
        return read_token_data(path, self._vocab_size, lossless_encoder(self._model.checkpoint))


def window_ids(windows: tuple[Window, ...]) -> Tensor:
    """int64 [T]: all windows laid end to end."""
    return torch.from_numpy(np.concatenate([window.ids for window in windows]))
