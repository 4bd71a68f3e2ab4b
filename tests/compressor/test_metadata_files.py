"""Which small files come along, byte for byte, and which are left behind with a reason."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from refusals import refusal, within_seconds

from memopt.compressor.metadata_files import MAX_METADATA_SIZE_BYTES, is_metadata_file, select_metadata
from memopt.errors import LayoutError, MalformedError, MissingFileError

COPIED = [
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tiktoken.tiktoken", "chat_template.jinja", "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "LICENSE", "LICENSE.md",
    "NOTICE", "THIRD_PARTY_NOTICES.txt", "USE_POLICY.md",
]  # fmt: skip
LEFT = ["README.md", "modeling_kimi.py", "pytorch_model.bin", "figure.png", ".gitattributes", "hf_quant_config.json"]
MADE_ANEW = [
    "config.json", "model.safetensors.index.json", "release.json", "ledger.jsonl", "SHA256SUMS", "model.sig",
    "model.0a1b2c3d.sig", "memopt.manifest.json", "memopt.chunks", "quality.json", "report.html",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in [*COPIED, *LEFT, *MADE_ANEW, "model-00001-of-00001.safetensors"]:
        (tmp_path / name).write_bytes(f"contents of {name} \u00e9\r\n".encode())
    (tmp_path / "inference").mkdir()
    return tmp_path


def test_what_is_copied_left_and_made_anew(folder: Path) -> None:
    chosen = select_metadata(folder, allow_code=False)
    assert [file.name for file in chosen.copied] == sorted(COPIED)
    assert {skipped.name for skipped in chosen.skipped} == {*LEFT, "inference/"}
    for file in chosen.copied:
        raw = (folder / file.name).read_bytes()
        assert (file.size_bytes, file.sha256, file.origin) == (len(raw), hashlib.sha256(raw).hexdigest(), "source")


def test_code_is_copied_only_when_allowed_and_says_so(folder: Path) -> None:
    reasons = {skipped.name: skipped.reason for skipped in select_metadata(folder, allow_code=False).skipped}
    assert "--allow-code" in reasons["modeling_kimi.py"]
    assert "--allow-code" not in reasons["README.md"]
    allowed = select_metadata(folder, allow_code=True)
    assert "modeling_kimi.py" in {file.name for file in allowed.copied}
    assert "modeling_kimi.py" not in {skipped.name for skipped in allowed.skipped}


@pytest.mark.parametrize(
    "name", ["../tokenizer.json", "a/tokenizer.json", "tokenizer.json\n", "C:tokenizer.json", "", ".."]
)
def test_a_name_that_leaves_the_folder_is_no_metadata(name: str) -> None:
    assert is_metadata_file("tokenizer.json")
    assert not is_metadata_file(name)


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
