"""KL and perplexity of several releases on held-out English and code, against the FP8 source.

    python -m benchmarks.smollm2.prepare OUT
    memopt compress OUT/checkpoint RELEASE --recipe …
    python -m benchmarks.smollm2.quality_table OUT RELEASE [RELEASE ...] [--windows 64] [--json]

The same figures as `memopt evaluate` in float32, whose base runs once here for all releases.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from memopt.compressor.evaluate.calibration_data import read_token_data
from memopt.compressor.evaluate.evaluate_release import text_encoder
from memopt.compressor.evaluate.quality import Conditions, Quality, measure_quality
from memopt.compressor.evaluate.stored_model import StoredModel
from memopt.compressor.evaluate.streamed_forward import StreamOptions, final_states
from memopt.compressor.evaluate.token_windows import document_windows
from memopt.compressor.evaluate.window_scores import score_windows, window_numbers

TEXTS = ("held-out-english", "held-out-code")
WINDOW_TOKENS = 512
NUM_WINDOWS = 64
OPTIONS = StreamOptions(compute="float32", kv_cache="fp32")


@dataclass(frozen=True, slots=True)
class Row:
    """One release on one text; KL in nats a token with the ends of its 95 % interval."""

    release: str
    text: str
    num_tokens: int
    kl: float
    kl_low: float
    kl_high: float
    top1: float
    base_perplexity: float
    perplexity: float


def text_rows(folder: Path, text: str, releases: list[Path], num_windows: int) -> Iterator[Row]:
    """Every release on one text."""
    base = folder / "checkpoint"
    with StoredModel(base) as model:
        data = read_token_data(folder / f"{text}.jsonl", model.config.vocab_size, text_encoder(base))
        windows = document_windows(data, WINDOW_TOKENS, num_windows)
        of_base = final_states(model, windows, OPTIONS)
        identity = model.identity()
    for release in releases:
        with StoredModel(release) as model:
            of_release = final_states(model, windows, OPTIONS)
            quality = measure_quality(
                score_windows(of_base, of_release, windows),
                window_numbers(windows),
                base=identity,
                release=model.identity(),
                data=data.digest,
                conditions=Conditions(0, WINDOW_TOKENS, len(windows), "float32", "fp32", "fp32"),
            )
        yield _row(release.name, text, quality)


def _row(release: str, text: str, quality: Quality) -> Row:
    return Row(
        release,
        text,
        quality.num_tokens,
        quality.kl.value,
        quality.kl.low,
        quality.kl.high,
        quality.top1.value,
        quality.base_perplexity.value,
        quality.release_perplexity.value,
    )


def main() -> None:
    """Print a line for every release and text as it is measured."""
    parser = argparse.ArgumentParser(description="Quality of releases of the SmolLM2 proof model.")
    parser.add_argument("output", type=Path, help="the folder that benchmarks.smollm2.prepare wrote")
    parser.add_argument("releases", type=Path, nargs="+")
    parser.add_argument(
        "--windows", type=int, default=NUM_WINDOWS, help=f"of up to {WINDOW_TOKENS} tokens, evenly spaced"
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    arguments = parser.parse_args()
    if not arguments.json:
        print(f"{'release':<24} {'text':<18} {'tokens':>7} {'KL':>8} {'95 %':>18} {'top-1':>7} {'ppl':>8} {'base':>8}")
    for text in TEXTS:
        for row in text_rows(arguments.output, text, arguments.releases, arguments.windows):
            if arguments.json:
                print(json.dumps(asdict(row)), flush=True)
                continue
            ends = f"{row.kl_low:.4f} to {row.kl_high:.4f}"
            print(
                f"{row.release:<24} {row.text:<18} {row.num_tokens:>7} {row.kl:>8.4f} {ends:>18} {row.top1:>7.4f} "
                f"{row.perplexity:>8.3f} {row.base_perplexity:>8.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
