"""Which small files come along, byte for byte, and which are left behind with a reason."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from refusals import refusal, within_seconds

from memopt.compressor.checkpoint.small_files import (
    MAX_METADATA_SIZE_BYTES,
    SourceFile,
    skip_reason,
    sort_small_files,
)
from memopt.compressor.metadata_files import missing_code, select_metadata
from memopt.errors import LayoutError, MalformedError, MissingFileError

COPIED = [
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tiktoken.tiktoken", "chat_template.jinja", "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "LICENSE", "LICENSE.md",
    "NOTICE", "THIRD_PARTY_NOTICES.txt", "USE_POLICY.md", "tiktoken.model", "Modified_MIT.txt", "tokenizer.next-form",
]  # fmt: skip
LEFT = [
    "README.md", "README_WEIGHTS.md", "modeling_kimi.py", "pytorch_model.bin", "figure.png", ".gitattributes",
    "hf_quant_config.json", "adapter_config.json", "consolidated.safetensors", "model.gguf", "a.pt", "a.pth", "a.pkl",
    "a.ckpt", "a.PTH", "lib.so", "run.sh", "paper.pdf", "code.tar.gz", "pytorch_model.bin.index.json",
]  # fmt: skip
# The tops of real repositories (folders end with "/"): what a release of each gets.
REPOSITORIES = {
    "zai-org/GLM-5.2-FP8": (
        {"LICENSE", "chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"},
        {".gitattributes", "README.md"},
        set(),
    ),
    "moonshotai/Kimi-K2.6": (
        {"LICENSE", "Modified_MIT.txt", "THIRD_PARTY_NOTICES.md", "chat_template.jinja", "generation_config.json",
         "preprocessor_config.json", "tiktoken.model", "tokenizer_config.json"},
        {".gitattributes", "README.md", "docs/", "figures/"},
        {"configuration_deepseek.py", "configuration_kimi_k25.py", "kimi_k25_processor.py", "media_utils.py",
         "kimi_k25_vision_processing.py", "modeling_deepseek.py", "modeling_kimi_k25.py", "tokenization_kimi.py",
         "tool_declaration_ts.py"},
    ),
    "moonshotai/Kimi-K2-Instruct": (
        {"LICENSE", "THIRD_PARTY_NOTICES.md", "chat_template.jinja", "generation_config.json", "tiktoken.model",
         "tokenizer_config.json"},
        {".gitattributes", "README.md", "docs/", "figures/"},
        {"configuration_deepseek.py", "modeling_deepseek.py", "tokenization_kimi.py"},
    ),
    "deepseek-ai/DeepSeek-V3": (
        {"LICENSE-CODE", "LICENSE-MODEL", "tokenizer.json", "tokenizer_config.json"},
        {".gitattributes", "README.md", "README_WEIGHTS.md", "figures/", "inference/"},
        {"configuration_deepseek.py", "modeling_deepseek.py"},
    ),
}  # fmt: skip
MADE_ANEW = [
    "config.json", "model.safetensors.index.json", "release.json", "ledger.jsonl", "SHA256SUMS", "model.sig",
    "model.0a1b2c3d.sig", "memopt.manifest.json", "memopt.chunks", "quality.json", "report.html",
]  # fmt: skip


SHARD = "model-00001-of-00001.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in [*COPIED, *LEFT, *MADE_ANEW, SHARD]:
        (tmp_path / name).write_bytes(f"contents of {name} \u00e9\r\n".encode())
    (tmp_path / "inference").mkdir()
    return tmp_path


def test_what_is_copied_left_and_made_anew(folder: Path) -> None:
    chosen = select_metadata(folder, weights={SHARD}, allow_code=False)
    assert all(skipped.reason for skipped in chosen.skipped)
    assert [file.name for file in chosen.copied] == sorted(COPIED)
    assert {skipped.name for skipped in chosen.skipped} == {*LEFT, "inference/"}
    for file in chosen.copied:
        raw = (folder / file.name).read_bytes()
        assert (file.size_bytes, file.sha256, file.origin) == (len(raw), hashlib.sha256(raw).hexdigest(), "source")


def test_code_is_copied_only_when_allowed_and_says_so(folder: Path) -> None:
    reasons = {skipped.name: skipped.reason for skipped in select_metadata(folder, allow_code=False).skipped}
    assert len(set(reasons.values())) >= 6
    assert "--allow-code" in reasons["modeling_kimi.py"]
    assert "--allow-code" not in reasons["README.md"]
    allowed = select_metadata(folder, allow_code=True)
    assert "modeling_kimi.py" in {file.name for file in allowed.copied}
    assert "modeling_kimi.py" not in {skipped.name for skipped in allowed.skipped}


@pytest.mark.parametrize(
    "name", ["../tokenizer.json", "a/tokenizer.json", "tokenizer.json\n", "C:tokenizer.json", "", ".."]
)
def test_a_name_that_leaves_the_folder_is_no_metadata(name: str) -> None:
    assert skip_reason("tokenizer.json", allow_code=False) is None
    assert skip_reason(name, allow_code=False) is not None


@pytest.mark.parametrize("repository", REPOSITORIES)
@pytest.mark.parametrize("allow_code", [False, True])
def test_what_a_release_of_each_family_gets(repository: str, allow_code: bool) -> None:
    wanted, left, code = REPOSITORIES[repository]
    made = {"config.json", "model.safetensors.index.json", SHARD}
    files = [SourceFile(name, None if name.endswith("/") else 1000) for name in wanted | left | code | made]
    copied, skipped = sort_small_files(files, weights={SHARD}, allow_code=allow_code)
    assert {file.name for file in copied} == (wanted | code if allow_code else wanted)
    assert {file.name for file in skipped} == (left if allow_code else left | code)


def test_where_the_publisher_lists_the_files_nothing_else_counts(folder: Path) -> None:
    listed = tuple(SourceFile(name, 1) for name in ("tokenizer.json", "config.json", "README.md", SHARD))
    chosen = select_metadata(folder, (*listed, SourceFile("figures/", None)), weights={SHARD}, allow_code=True)
    assert [file.name for file in chosen.copied] == ["tokenizer.json"]
    assert [file.name for file in chosen.skipped] == ["README.md", "figures/"]


def test_a_large_file_that_no_engine_needs_is_left_behind_unread(folder: Path) -> None:
    with (folder / "notes.txt").open("wb") as stream:
        stream.truncate(2**40)
    with within_seconds(5):
        reasons = {skipped.name: skipped.reason for skipped in select_metadata(folder, allow_code=False).skipped}
    assert f"{2**40:,}" in reasons["notes.txt"]


@pytest.mark.parametrize("name", ["a\\b.json", "C:x.txt", "a\u202eb.json", "a\nb.txt", "Config.json", "LEDGER.jsonl"])
def test_a_name_that_no_release_may_hold_is_left_behind_and_told_in_print(name: str) -> None:
    copied, skipped = sort_small_files([SourceFile(name, 5)], weights=(), allow_code=True)
    assert copied == ()
    assert len(skipped) == 1
    assert skipped[0].name.isprintable()


def test_code_that_a_configuration_names_and_the_release_lacks(tmp_path: Path) -> None:
    config = {"auto_map": {"AutoConfig": "configuration_x.XConfig", "AutoModel": "org/other--modeling_x.X"}}
    (tmp_path / "tokenizer_config.json").write_text(
        '{"a": [{"auto_map": {"AutoTokenizer": ["tokenization_x.Tokenizer", null]}}], "b": "not.named"}'
    )
    (tmp_path / "generation_config.json").write_text("{")
    names = {"tokenizer_config.json", "generation_config.json", "tokenizer.json"}
    assert missing_code(config, tmp_path, names) == (
        "config.json names configuration_x.py",
        "config.json names org/other: modeling_x.py",
        "tokenizer_config.json names tokenization_x.py",
    )
    copied = names | {"configuration_x.py", "tokenization_x.py"}
    assert missing_code(config, tmp_path, copied) == ("config.json names org/other: modeling_x.py",)
    assert missing_code({}, tmp_path, copied) == ()
    assert missing_code(config, None, ()) == (
        "config.json names configuration_x.py",
        "config.json names org/other: modeling_x.py",
    )


def test_a_huge_file_is_refused_unread(folder: Path) -> None:
    with (folder / "tokenizer.json").open("wb") as stream:
        stream.truncate(2**40)
    with within_seconds(5), refusal(MalformedError, "tokenizer.json", f"{2**40:,}", f"{MAX_METADATA_SIZE_BYTES:,}"):
        select_metadata(folder, allow_code=False)


def test_a_fifo_and_a_dangling_link_in_a_metadata_files_place(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    with within_seconds(5), refusal(LayoutError, "tokenizer.json", "not a regular file"):
        select_metadata(folder, allow_code=False)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("gone")
    with refusal(MissingFileError, "tokenizer.json"):
        select_metadata(folder, allow_code=False)


def test_odd_files_that_nobody_needs_do_no_harm(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "broken").symlink_to("gone")
    with within_seconds(5):
        skipped = {skipped.name for skipped in select_metadata(folder, allow_code=False).skipped}
    assert {"pipe", "broken"} <= skipped


def test_a_name_that_is_not_utf8_is_refused(folder: Path) -> None:
    with open(os.fsencode(folder) + b"/\xff.txt", "wb"):
        pass
    with refusal(LayoutError, "\\udcff.txt", str(folder), "not a UTF-8 file name"):
        select_metadata(folder, allow_code=False)
