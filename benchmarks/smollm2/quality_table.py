"""KL, top-1 agreement and perplexity of several releases on held-out texts, against the FP8 source.

The figures of `memopt evaluate` in float32. The base runs once for all releases, and its logits are made once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.smollm2.lossless_encoder import lossless_encoder
from memopt.compressor.evaluate.bootstrap import Interval
from memopt.compressor.evaluate.calibration_data import read_token_data
from memopt.compressor.evaluate.quality import Conditions, Quality, measure_quality
from memopt.compressor.evaluate.stored_model import StoredModel
from memopt.compressor.evaluate.streamed_forward import FinalStates, StreamOptions, final_states
from memopt.compressor.evaluate.token_scores import TokenScores, joined, placed, score_logits
from memopt.compressor.evaluate.token_windows import Window, document_windows
from memopt.compressor.evaluate.window_scores import window_numbers

OPTIONS = StreamOptions(compute="float32", kv_cache="fp32")
SEED = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One release on one text; `kl` in nats a token, with the ends of its 95 % interval."""

    release: str
    text: str
    num_tokens: int
    num_documents: int
    kl: Interval
    top1: Interval
    base_perplexity: float
    perplexity: float


def text_rows(
    base: Path, text: Path, releases: Sequence[Path], *, num_windows: int, window_tokens: int
) -> Iterator[Row]:
    """Every release on the documents of `text` (.jsonl), in order; raises as `memopt evaluate`."""
    with ExitStack() as stack:
        base_model = stack.enter_context(StoredModel(base))
        data = read_token_data(text, base_model.config.vocab_size, lossless_encoder(base))
        windows = document_windows(data, window_tokens, num_windows)
        of_base = final_states(base_model, windows, OPTIONS)
        models = [stack.enter_context(StoredModel(release)) for release in releases]
        states = [final_states(model, windows, OPTIONS) for model in models]
        scores = release_scores(of_base, states, windows)
        for model, found in zip(models, scores, strict=True):
            quality = measure_quality(
                found,
                window_numbers(windows),
                base=base_model.identity(),
                release=model.identity(),
                data=data.digest,
                conditions=Conditions(SEED, window_tokens, len(windows), "float32", "fp32", "fp32"),
            )
            yield _row(model.folder.name, text.stem, quality)


def release_scores(base: FinalStates, releases: Sequence[FinalStates], windows: Sequence[Window]) -> list[TokenScores]:
    """Figures of every release on the same windows."""
    found: list[list[TokenScores]] = [[] for _ in releases]
    first_row = 0
    with torch.no_grad():
        for window in windows:
            next_ids = torch.from_numpy(window.ids[1:])
            logits = base.logits(first_row, window.num_predicted)
            for states, scores in zip(releases, found, strict=True):
                of_release = states.logits(first_row, window.num_predicted)
                scores.append(placed(score_logits(logits, of_release, next_ids), window.document, window.start))
            first_row += len(window.ids)
    return [joined(scores) for scores in found]


def _row(release: str, text: str, quality: Quality) -> Row:
    return Row(
        release,
        text,
        quality.num_tokens,
        quality.num_documents,
        quality.kl,
        quality.top1,
        quality.base_perplexity.value,
        quality.release_perplexity.value,
    )
