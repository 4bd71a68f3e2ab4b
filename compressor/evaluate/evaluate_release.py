"""A release against its base on data: both streamed a layer at a time, then compared token by token."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from memopt.compressor.evaluate.calibration_data import IDS_SUFFIX, TEXT_SUFFIX, Encode, TokenData, read_token_data
from memopt.compressor.evaluate.quality import Conditions, Quality, measure_quality
from memopt.compressor.evaluate.release_gate import refuse_calibration_data
from memopt.compressor.evaluate.release_weights import require_release
from memopt.compressor.evaluate.task_scores import TaskScore
from memopt.compressor.evaluate.token_scores import TokenScores
from memopt.compressor.evaluate.token_windows import Window, document_windows
from memopt.compressor.evaluate.window_scores import score_windows, window_numbers
from memopt.errors import DataFileError, ShapeError, UnsupportedError, UsageError
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
    by memopt, ShapeError for another vocabulary, DataFileError for the data that it was calibrated on.
    """
    with ExitStack() as stack:
        pair = _opened(stack, base, release, data, options)
        scratch = options.scratch and Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.scratch)))
        scores = _scores(pair, replace(options, scratch=scratch), on_progress)
        return measure_quality(
            scores,
            window_numbers(pair.windows),
            base=pair.base.identity(pair.release.source_sha256),
            release=pair.release.identity(),
            data=pair.data.digest,
            conditions=_conditions(options, len(pair.windows)),
            tasks=tasks,
        )


def check_evaluation(base: Path, release: Path, data: Path, options: EvaluateOptions) -> None:
    """Raise what `evaluate_release` would raise before its work: all that headers, ledger and data tell."""
    with ExitStack() as stack:
        _opened(stack, base, release, data, options)


@dataclass(frozen=True, slots=True)
class _Pair:
    """What is compared, and on what."""

    base: StoredModel
    release: StoredModel
    data: TokenData
    windows: tuple[Window, ...]


def _opened(stack: ExitStack, base: Path, release: Path, data: Path, options: EvaluateOptions) -> _Pair:
    """Both models, which `stack` closes, and the windows of the data."""
    from memopt.compressor.evaluate.stored_model import StoredModel

    require_release(release)
    of_base, of_release = (stack.enter_context(StoredModel(folder)) for folder in (base, release))
    if of_base.config.vocab_size != of_release.config.vocab_size:
        raise ShapeError(
            f"vocabularies of {of_base.config.vocab_size:,} and {of_release.config.vocab_size:,} tokens",
            remedy="compare a release with what it was made from",
        )
    encode = text_encoder(base) if data.suffix == TEXT_SUFFIX else None
    read = read_token_data(data, of_base.config.vocab_size, encode)
    refuse_calibration_data(release, read.digest.sha256, data.name)
    windows = document_windows(read, options.window_tokens, options.max_windows)
    longest = max(len(window.ids) for window in windows)
    max_tokens = min(of_base.config.max_tokens, of_release.config.max_tokens)
    if longest > max_tokens:
        raise UsageError(
            f"windows of {longest:,} tokens, the model is made for {max_tokens:,}", remedy=f"use --window {max_tokens}"
        )
    return _Pair(of_base, of_release, read, windows)


def text_encoder(folder: Path) -> Encode:
    """Text to ids as the runtime encodes a plain prompt: with what the tokenizer itself puts around it, often nothing.

    Raises as `load_tokenizer`.
    """
    from memopt.runtime.text.tokenizer import MAX_TOKENIZER_BYTES, load_tokenizer

    def read_file(name: str) -> bytes:
        return read_capped(folder / name, MAX_TOKENIZER_BYTES, DataFileError)

    try:
        return load_tokenizer(read_file, [path.name for path in folder.iterdir() if path.is_file()]).encode
    except UnsupportedError as problem:
        problem.remedy = f"tokenize the text yourself, and give its ids in a {IDS_SUFFIX} file"
        raise


def _conditions(options: EvaluateOptions, num_windows: int) -> Conditions:
    return Conditions(
        options.seed,
        options.window_tokens,
        num_windows,
        options.compute,
        options.base_kv_cache or options.plain_kv_cache,
        options.kv_cache or options.plain_kv_cache,
    )


def _scores(pair: _Pair, options: EvaluateOptions, on_progress: OnProgress) -> TokenScores:
    """Figures of every prediction, window after window."""
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
        return final_states(model, pair.windows, stream)

    of_base = states(pair.base, "base", options.base_kv_cache)
    of_release = states(pair.release, "release", options.kv_cache)
    return score_windows(of_base, of_release, pair.windows, lambda done, total: on_progress("compare", done, total))
