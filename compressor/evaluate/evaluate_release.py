"""A release against its base on data: both streamed a layer at a time, then compared token by token."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from memopt.compressor.evaluate.calibration_data import Encode, read_token_data
from memopt.compressor.evaluate.quality import Conditions, Quality, measure_quality
from memopt.compressor.evaluate.task_scores import TaskScore
from memopt.compressor.evaluate.token_scores import TokenScores, joined, placed, score_logits
from memopt.compressor.evaluate.token_windows import Window, document_windows
from memopt.errors import DataFileError, ShapeError, UsageError
from memopt.manifests.strict_json import read_capped

if TYPE_CHECKING:
    from memopt.compressor.evaluate.stored_model import StoredModel
    from memopt.compressor.evaluate.streamed_forward import FinalStates

WINDOW_TOKENS = 2_048
# Called with what is being done, and how much of it: ("base", 3, 78).
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class EvaluateOptions:
    """`window_tokens`: the longest context. `max_windows`: that many of them, evenly spaced; None for all.

    `compute`: float32 (CPU only) compares weights alone, bfloat16 is what is served. `kv_cache`: the release's;
    `base_kv_cache`: the base's; None: nothing is rounded in float32, BF16 in bfloat16. `scratch`: a folder for hidden
    states, which otherwise stay in memory.
    """

    window_tokens: int = WINDOW_TOKENS
    max_windows: int | None = None
    seed: int = 0
    compute: Literal["bfloat16", "float32"] = "bfloat16"
    kv_cache: str | None = None
    base_kv_cache: str | None = None
    device: str = "cpu"
    batch_tokens: int | None = None
    scratch: Path | None = None

    @property
    def plain_kv_cache(self) -> str:
        """The KV format that adds no rounding to the activations' own."""
        return "fp32" if self.compute == "float32" else "bf16"


def evaluate_release(
    base: Path,
    release: Path,
    data: Path,
    options: EvaluateOptions,
    *,
    tasks: Sequence[TaskScore] = (),
    on_progress: OnProgress = lambda part, done, total: None,
) -> Quality:
    """Quality of `release` against `base` on the documents of `data` (calibration_data.py says what is read).

    One layer of one model is in memory at a time, besides the hidden states of both. Every tensor of the release is
    compared with its ledger. Raises what reading, building and comparing raise; UsageError when `release` was not made
    by memopt, ShapeError for another vocabulary.
    """
    from memopt.compressor.evaluate.stored_model import StoredModel

    with ExitStack() as stack:
        of_base, of_release = (stack.enter_context(StoredModel(folder)) for folder in (base, release))
        if not of_release.is_release:
            raise UsageError(
                f"{release} has no release.json and ledger.jsonl", remedy="name the base first, then the release"
            )
        if of_base.config.vocab_size != of_release.config.vocab_size:
            raise ShapeError(
                f"vocabularies of {of_base.config.vocab_size:,} and {of_release.config.vocab_size:,} tokens",
                remedy="compare a release with what it was made from",
            )
        read = read_token_data(data, of_base.config.vocab_size, text_encoder(base) if data.suffix == ".jsonl" else None)
        windows = document_windows(read, options.window_tokens, options.max_windows)
        longest = max(len(window.ids) for window in windows)
        if longest > of_base.config.max_tokens:
            raise UsageError(
                f"windows of {longest:,} tokens, the model is made for {of_base.config.max_tokens:,}",
                remedy=f"use --window {of_base.config.max_tokens}",
            )
        scratch = options.scratch and Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.scratch)))
        scores = _scores(of_base, of_release, windows, replace(options, scratch=scratch), on_progress)
        window_of = np.repeat(np.arange(len(windows)), [window.num_predicted for window in windows])
        return measure_quality(
            scores,
            window_of,
            base=of_base.identity(of_release.source_sha256),
            release=of_release.identity(),
            data=read.digest,
            conditions=_conditions(options, len(windows)),
            tasks=tasks,
        )


def text_encoder(folder: Path) -> Encode:
    """Text to ids, without special tokens, by the tokenizer of a checkpoint; raises as `load_tokenizer`."""
    from memopt.runtime.text.tokenizer import MAX_TOKENIZER_BYTES, load_tokenizer

    def read_file(name: str) -> bytes:
        return read_capped(folder / name, MAX_TOKENIZER_BYTES, DataFileError)

    return load_tokenizer(read_file, [path.name for path in folder.iterdir() if path.is_file()]).encode


def _conditions(options: EvaluateOptions, num_windows: int) -> Conditions:
    return Conditions(
        options.seed,
        options.window_tokens,
        num_windows,
        options.compute,
        options.base_kv_cache or options.plain_kv_cache,
        options.kv_cache or options.plain_kv_cache,
    )


def _scores(
    base: StoredModel,
    release: StoredModel,
    windows: tuple[Window, ...],
    options: EvaluateOptions,
    on_progress: OnProgress,
) -> TokenScores:
    """Figures of every prediction, window after window."""
    import torch

    from memopt.compressor.evaluate.streamed_forward import BATCH_TOKENS, StreamOptions, final_states

    def states(model: StoredModel, part: str, kv_cache: str | None) -> FinalStates:
        stream = StreamOptions(
            compute=options.compute,
            kv_cache=kv_cache or options.plain_kv_cache,  # type: ignore[arg-type]  # kv_format refuses another name
            device=options.device,
            batch_tokens=options.batch_tokens or BATCH_TOKENS,
            scratch=options.scratch,
            part=part,
            on_layer=lambda done, total: on_progress(part, done, total),
        )
        return final_states(model, windows, stream)

    of_base, of_release = states(base, "base", options.base_kv_cache), states(release, "release", options.kv_cache)
    scores: list[TokenScores] = []
    row = 0
    with torch.no_grad():
        for number, window in enumerate(windows, start=1):
            next_ids = torch.from_numpy(window.ids[1:]).to(options.device)
            found = score_logits(
                of_base.logits(row, window.num_predicted), of_release.logits(row, window.num_predicted), next_ids
            )
            scores.append(placed(found, window.document, window.start))
            row += len(window.ids)
            on_progress("compare", number, len(windows))
    return joined(scores)
